"""One CSV row per step, and W&B without an account."""

import csv

import pytest

from lightning_entrain.errors import ConfigError
from lightning_entrain.loggers import StepCSVLogger, make_wandb_logger, wandb_key_is_configured


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_values_of_one_step_share_a_row_across_saves(tmp_path):
    logger = StepCSVLogger(tmp_path / "run")
    for step in range(3):
        logger.log_metrics({"train/loss": 3.0 - step, "epoch": 0}, step=step)
        logger.save()
        if step == 1:
            logger.log_metrics({"val/loss": 9.0}, step=step)
            logger.save()
    logger.finalize("success")
    rows = read(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [row["train/loss"] for row in rows] == ["3.0", "2.0", "1.0"]
    assert [row["val/loss"] for row in rows] == ["", "9.0", ""]
    assert list(rows[0]) == ["step", "epoch", "train/loss", "val/loss"]


def test_an_older_file_is_replaced_and_neighbours_stay(tmp_path):
    (tmp_path / "metrics.csv").write_text("step\n0\n")
    (tmp_path / "other.txt").write_text("kept")
    logger = StepCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=5)
    logger.finalize("success")
    assert [row["step"] for row in read(tmp_path / "metrics.csv")] == ["5"]
    assert (tmp_path / "other.txt").read_text() == "kept"


def test_a_key_is_found_in_the_environment_and_in_netrc(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not wandb_key_is_configured({})
    assert wandb_key_is_configured({"WANDB_API_KEY": "k"})
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_key_is_configured({"NETRC": str(file)})
    other = {"NETRC": str(file), "WANDB_BASE_URL": "https://wandb.example.org"}
    assert not wandb_key_is_configured(other)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "offline"), ({"WANDB_API_KEY": "k"}, "online"), ({"WANDB_MODE": "disabled"}, "disabled")],
)
def test_auto_mode(variables, expected, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert make_wandb_logger(str(tmp_path))._wandb_init["mode"] == expected


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'sometimes'\. Limit: one of auto"):
        make_wandb_logger(str(tmp_path), mode="sometimes")
