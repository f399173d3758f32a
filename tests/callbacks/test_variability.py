"""WorkloadVariabilityMonitor writes the four documented keys every step, to every logger."""

import csv
import json
import re
import subprocess
import sys
import time

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_entrain import WorkloadVariabilityMonitor
from lightning_entrain.errors import ConfigError
from lightning_entrain.loggers import StepCSVLogger, make_wandb_logger

KEYS = [
    "variability/encoder_cv",
    "variability/encoder_std",
    "variability/llm_cv",
    "variability/llm_std",
]
# Patches 4, 12 | 0, 8 | 8, 8 | 0, 0; tokens 2, 8 | 3, 5 | 4, 4 | 6, 2.
EXPECTED = [
    (0.5, 4.0, 0.6, 3.0),
    (1.0, 4.0, 0.25, 1.0),
    (0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.5, 2.0),
]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def values(rows):
    return [pytest.approx(tuple(float(row[key]) for key in KEYS), rel=1e-6) for row in rows]


@pytest.mark.parametrize("logger_class", [CSVLogger, StepCSVLogger])
def test_csv_has_one_row_per_step_with_loss_and_spread(logger_class, fit, batches, tmp_path):
    logger = logger_class(tmp_path / "logs")
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=1)
    rows = rows_of(f"{logger.log_dir}/metrics.csv")
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["train/loss"]) for row in rows] == [1, 2, 3, 4]
    assert values(rows) == EXPECTED


def test_every_step_is_logged_where_the_trainer_logs_rarely(fit, batches, tmp_path):
    logger = StepCSVLogger(tmp_path)
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=3)
    assert values(rows_of(tmp_path / "metrics.csv")) == EXPECTED


def test_values_can_be_monitored_without_any_logger(fit, batches):
    trainer = fit(batches, [WorkloadVariabilityMonitor()], False)
    assert values([trainer.callback_metrics]) == EXPECTED[-1:]


def test_documented_keys_are_the_logged_ones(batches):
    table = re.findall(r"\| `(variability/\w+)`", WorkloadVariabilityMonitor.__doc__)
    assert table == list(WorkloadVariabilityMonitor.measure(batches[0])) == KEYS


def test_wandb_offline_run_holds_every_step(fit, batches, tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = make_wandb_logger(str(tmp_path), mode="offline")
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=1)
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = read_history(path)
    assert [row["trainer/global_step"] for row in history] == [0, 1, 2, 3]
    assert values(history) == EXPECTED


def read_history(path):
    """Rows of a W&B file, read once its closing record is on disk."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    for _ in range(50):
        text = subprocess.run(command, capture_output=True, text=True).stdout
        records = [json.loads(line) for line in text.splitlines()]
        if any(record["type"] == "exit" for record in records):
            break
        time.sleep(0.1)
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def test_a_batch_without_a_plan_is_refused(fit):
    with pytest.raises(ConfigError, match=r"type int.*Remedy: train with EntrainDataModule"):
        fit([1, 2], [WorkloadVariabilityMonitor()], False)
