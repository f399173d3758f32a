"""WorkloadVariabilityMonitor writes its documented keys every step, to every logger."""

import csv
import re
import time

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_entrain import WorkloadVariabilityMonitor
from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.callbacks.variability import measure
from lightning_entrain.errors import ConfigError
from lightning_entrain.loggers import StepCSVLogger, make_wandb_logger
from lightning_entrain.observe.wandb_file import read_wandb_file
from lightning_entrain.workload.sizes import SampleSize

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


def test_csv_has_one_row_per_step_with_loss_and_spread(fit, batches, tmp_path):
    logger = StepCSVLogger(tmp_path / "logs")
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=1)
    rows = rows_of(f"{logger.log_dir}/metrics.csv")
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["train/loss"]) for row in rows] == [1, 2, 3, 4]
    assert values(rows) == EXPECTED


def test_lightnings_own_csv_logger_has_every_value_at_its_step(fit, batches, tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=1)
    rows = [row for row in rows_of(f"{logger.log_dir}/metrics.csv") if row[KEYS[0]]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert values(rows) == EXPECTED


def test_every_step_is_logged_where_the_trainer_logs_rarely(fit, batches, tmp_path):
    logger = StepCSVLogger(tmp_path)
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=3)
    assert values(rows_of(tmp_path / "metrics.csv")) == EXPECTED


def test_values_can_be_monitored_without_any_logger(fit, batches):
    trainer = fit(batches, [WorkloadVariabilityMonitor()], False)
    assert values([trainer.callback_metrics]) == EXPECTED[-1:]


def documented(monitor):
    return re.findall(r"\| `([a-z_/]+)` \|", monitor.__doc__)


def sized(patches, text):
    grids = ((1, 2, patches // 2),) if patches else ()
    return SampleSize(grids=grids, num_text_tokens=text, num_label_tokens=1)


def test_every_documented_key_has_the_value_computed_by_hand():
    """Two replicas; sample 1 of replica 0 is decoded one microbatch after its encoding."""
    sizes = [sized(4, 1), sized(8, 2), sized(4, 3), sized(0, 5)]
    assignment = Assignment(
        replicas=(
            ReplicaAssignment(encoder=((0, 1), ()), llm=((0,), (1,))),
            ReplicaAssignment(encoder=((2,), ()), llm=((2,), (3,))),
        ),
        policy="entrain",
    ).with_costs([1, 3, 2, 0], [2, 4, 6, 4])
    found = measure(
        assignment, sizes, in_milliseconds=True, plan_shares={"encoder": 0.3, "llm": 0.7}
    )
    # Encoder loads 4, 0 | 2, 0 ms (12, 0 | 4, 0 patches); LLM loads 2, 4 | 6, 4 ms (tokens 2, 4 |
    # 4, 5). In sampler order: encoder 1, 3 | 2, 0; LLM the same. Bounds: encoder 3 and 2, LLM 4
    # and 6.
    expected = {
        "variability/encoder_cv": (11 / 4) ** 0.5 / 1.5,
        "variability/encoder_std_ms": (11 / 4) ** 0.5,
        "variability/encoder_std": 24**0.5,
        "variability/encoder_max_over_mean": 4 / 1.5,
        "variability/encoder_bound_gap": 1 / 3,
        "variability/encoder_replica_max_over_mean": 4 / 3,
        "variability/fixed_encoder_cv": (5 / 4) ** 0.5 / 1.5,
        "variability/llm_cv": 2**0.5 / 4,
        "variability/llm_std_ms": 2**0.5,
        "variability/llm_std": (19 / 16) ** 0.5,
        "variability/llm_max_over_mean": 1.5,
        "variability/llm_bound_gap": 0.0,
        "variability/llm_replica_max_over_mean": 10 / 8,
        "variability/fixed_llm_cv": 2**0.5 / 4,
        "variability/encoder_llm_ratio": 6 / 16,
        "variability/plan_encoder_llm_ratio": 3 / 7,
        "variability/deferred_samples": 1.0,
        "variability/deferred_tokens": 4.0,
        "variability/num_microbatches": 2.0,
    }
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert sorted(found) == sorted(documented(WorkloadVariabilityMonitor))
    with pytest.raises(ValueError, match="longer"):  # rather than values of some samples
        measure(assignment, [*sizes, sizes[0]], in_milliseconds=True)


def test_without_costs_in_milliseconds_only_those_keys_are_missing(fit, batches):
    trainer = fit(batches, [WorkloadVariabilityMonitor()], False)
    found = {key for key in trainer.callback_metrics if key.startswith("variability/")}
    missing = {k for k in documented(WorkloadVariabilityMonitor) if "_ms" in k or "plan_" in k}
    assert found == set(documented(WorkloadVariabilityMonitor)) - missing


def test_wandb_offline_run_holds_every_step(fit, batches, tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = make_wandb_logger(str(tmp_path), mode="offline")
    fit(batches, [WorkloadVariabilityMonitor()], logger, log_every_n_steps=1)
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    file = read_complete(path)
    rows = [row for row in file.history if "variability/llm_cv" in row]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2, 3]
    assert values(rows) == EXPECTED
    assert file.metrics["variability/*"]["step_metric"] == "trainer/global_step"
    (table,) = [row for row in file.history if "tables/microbatch_loads/_type" in row]
    assert table["tables/microbatch_loads/nrows"] == 4 * 2 * 2


def read_complete(path):
    """A W&B file, read once its closing record is on disk."""
    for _ in range(100):
        file = read_wandb_file(path)
        if file.complete:
            return file
        time.sleep(0.1)
    raise AssertionError(f"{path} was not finished")


def test_a_batch_without_a_plan_is_refused(fit):
    with pytest.raises(ConfigError, match=r"type int.*Remedy: train with EntrainDataModule"):
        fit([1, 2], [WorkloadVariabilityMonitor()], False)


def test_the_runs_spread_is_that_of_all_its_microbatches(fit, batches):
    monitor = WorkloadVariabilityMonitor()
    fit(batches, [monitor], False)
    spread = monitor.run_spread["llm"].spread()
    assert (spread.count, spread.mean, spread.smallest, spread.largest) == (8, 4.25, 2.0, 8.0)
    assert monitor.run_spread["encoder"].spread().count == 8
