"""Lightning loggers as the apps set them up."""

from __future__ import annotations

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
            self._experiment = _StepWriter(self.save_dir)
        return self._experiment

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row too."""
        if isinstance(self._experiment, _StepWriter):
            self._experiment.save_all()


class _StepWriter(ExperimentWriter):
    """Holds the newest row back until the next step begins, so that it can still grow."""

    def _check_log_dir_exists(self) -> None:
        Path(self.metrics_file_path).unlink(missing_ok=True)

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
