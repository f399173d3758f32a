"""Lightning loggers as the apps set them up."""

from __future__ import annotations

import csv
import math
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import wandb
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_entrain.errors import ConfigError
from lightning_entrain.runtime.multirun import job_name, sweep_name

_DEFAULT_WANDB_HOST = "https://api.wandb.ai"
_WANDB_MODES = ("auto", "online", "offline", "disabled")


class StepCSVLogger(CSVLogger):
    """A `CSVLogger` whose `metrics.csv` has one row per step.

    Lightning's own writes one row per call, so values of callbacks and of the validation would
    stand in rows beside the step's loss. Here values logged with the same `step` share a row, and
    `step` is the first column.

    Args:
        save_dir: Folder that `metrics.csv` is written to, with no folders in between.
        flush_logs_every_n_steps: How often the file is brought up to date.
    """

    def __init__(self, save_dir: str | Path, *, flush_logs_every_n_steps: int = 10) -> None:
        super().__init__(
            save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps
        )
        self._keep_before = 0

    def keep_before(self, step: int) -> None:
        """Go on in a `metrics.csv` that is there, after its rows of the steps before this one.

        Without this call, or with 0, a former file is replaced.

        Args:
            step: First step that is logged now; later rows of the file are dropped.
        """
        self._keep_before = step

    @property
    def log_dir(self) -> str:
        """The folder that holds `metrics.csv`."""
        return self.save_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer; it exists on rank 0 alone."""
        if self._experiment is None:
            Path(self.save_dir).mkdir(parents=True, exist_ok=True)
            self._experiment = _StepWriter(self.save_dir, keep_before=self._keep_before)
        return self._experiment

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row too."""
        if isinstance(self._experiment, _StepWriter):
            self._experiment.save_all()


class _StepWriter(ExperimentWriter):
    """Holds the newest row back until the next step begins, so that it can still grow."""

    def __init__(self, log_dir: str, *, keep_before: int = 0) -> None:
        self._keep_before = keep_before
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        rows: list[dict[str, str]] = []
        if self._keep_before and path.is_file():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                keys = list(reader.fieldnames or ())
                if "step" in keys:
                    rows = [row for row in reader if _step_of(row) < self._keep_before]
        if not rows:
            path.unlink(missing_ok=True)
            return
        self.metrics_keys = keys
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=keys)
            writer.writeheader()
            writer.writerows({key: row[key] for key in keys} for row in rows)
        os.replace(partial, path)

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
        if len(self.metrics) > 1 and self.metrics[-1]["step"] == self.metrics[-2]["step"]:
            self.metrics[-2].update(self.metrics.pop())

    def save(self) -> None:
        held = self.metrics[-1:]
        self.metrics = self.metrics[:-1]
        super().save()
        self.metrics = held

    def save_all(self) -> None:
        super().save()
        self.metrics = []

    def _record_new_keys(self) -> set[str]:
        new_keys = super()._record_new_keys()
        self.metrics_keys.sort(key=lambda key: (key != "step", key != "epoch", key))
        return new_keys


def _step_of(row: Mapping[str, str]) -> float:
    """Step of a row; infinite where a kill cut the row off."""
    try:
        return math.inf if None in row.values() else float(row["step"])
    except ValueError:
        return math.inf


def wandb_key_is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether W&B could log in on its own: a key in the environment or in the netrc file."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(environment.get("WANDB_BASE_URL") or _DEFAULT_WANDB_HOST).hostname or ""
    named = environment.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def make_wandb_logger(
    save_dir: str,
    *,
    project: str = "lightning-entrain",
    name: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    mode: str = "auto",
) -> WandbLogger:
    """A `WandbLogger` that needs no account: offline unless a key is configured.

    Args:
        save_dir: Folder that the run's files are written below, in `wandb/`.
        project: W&B project.
        name: Name of the run. None: in a Hydra sweep what sets the job apart, such as
            `assignment=fixed`; otherwise W&B makes one up.
        group: Name that runs to be compared share. None: the sweep, if there is one.
        tags: Tags of the run.
        mode: `auto` takes WANDB_MODE where it is set, else `online` where a key is configured,
            else `offline`.

    Raises:
        ConfigError: If the mode is none of auto, online, offline, disabled.
    """
    if mode not in _WANDB_MODES:
        raise ConfigError(
            f"The W&B mode is {mode!r}",
            limit=f"one of {', '.join(_WANDB_MODES)}",
            remedy="set logger.wandb.mode=auto",
        )
    if mode == "auto":
        found = "online" if wandb_key_is_configured() else "offline"
        mode = os.environ.get("WANDB_MODE") or found
    group = group or sweep_name()
    name = name or job_name()
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for variable, subfolder in (("WANDB_DATA_DIR", "data"), ("WANDB_CACHE_DIR", "cache")):
        os.environ.setdefault(variable, str(folder / "wandb" / subfolder))
    # `offline=True` would set WANDB_MODE for the whole process, and so for the jobs after this one.
    logger = WandbLogger(
        save_dir=str(folder),
        project=project,
        name=name,
        group=group,
        tags=tags,
        mode=mode,
        settings=wandb.Settings(silent=mode != "online"),
    )
    logger._wandb_init.pop("anonymous", None)  # W&B warns of it, whatever its value
    return logger


def continue_wandb_run(logger: WandbLogger, run_id: str) -> None:
    """Log to a W&B run that exists, unless the logger has begun one.

    Offline, the part that follows is a folder of its own with the same id, and `wandb sync` of
    both uploads one run.
    """
    if logger._experiment is not None:
        return
    logger._wandb_init["id"] = logger._id = run_id
    if logger._wandb_init.get("mode") == "online":
        logger._wandb_init["resume"] = "allow"
