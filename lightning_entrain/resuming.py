"""What a run takes over from the one that it goes on with: how far it came, and its history."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from lightning_entrain.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_entrain.observe.run_record import RunRecord

_MAX_VALUES = 4096
_WANDB_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a checkpoint stands.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps done.
        epochs: Whole passes over the data done.
    """

    path: Path
    step: int
    epochs: int

    @classmethod
    def read(cls, path: str | Path) -> ResumePoint | None:
        """Read it without the tensors; None if the checkpoint does not tell."""
        from lightning_entrain.checkpoint.files import EntrainCheckpointIO, existing
        from lightning_entrain.checkpoint.sharded import is_sharded, read_sharded

        path = Path(path)
        found = existing(path)
        checkpoint: Mapping[str, Any]
        try:
            if is_sharded(found):
                checkpoint = read_sharded(found, lambda part, name: False)
            else:
                checkpoint = EntrainCheckpointIO(memory_map=True).load_checkpoint(found)
        except pickle.UnpicklingError:  # it holds more than weights; the trainer tells what
            return None
        if "global_step" not in checkpoint:
            return None
        epochs: Any = checkpoint
        for key in ("loops", "fit_loop", "epoch_progress", "current", "processed"):
            epochs = epochs.get(key, {})
        return cls(path=path, step=int(checkpoint["global_step"]), epochs=int(epochs or 0))

    def is_in(self, folder: str | Path) -> bool:
        """Whether the checkpoint lies in a run's folder, so that the run goes on there."""
        return self.path.resolve().is_relative_to(Path(folder).resolve())

    def check_limits(self, *, max_steps: int, max_epochs: int | None) -> None:
        """Refuse a checkpoint behind which nothing is left to train.

        Args:
            max_steps: The trainer's; -1 for none.
            max_epochs: The trainer's; None or -1 for none.

        Raises:
            ConfigError: If it is at one of them.
        """
        limits = (("steps", self.step, max_steps), ("epochs", self.epochs, max_epochs))
        for name, done, wanted in limits:
            if wanted is not None and 0 <= wanted <= done:
                raise ConfigError(
                    f"trainer.max_{name} is {wanted}, and ckpt_path={self.path} has {done} {name} "
                    "behind it already",
                    limit=f"above {done}, for the {name} of the earlier run count",
                    remedy=f"set trainer.max_{name}={max(2 * done, 1)}",
                )


def earlier_record(folder: str | Path, before_step: int) -> RunRecord | None:
    """What the run in a folder logged before a step; None if nothing can be read.

    `metrics.csv` goes first: it is there also after a kill.
    """
    from lightning_entrain.observe.run_files import read_csv, read_record
    from lightning_entrain.observe.run_record import RECORD_FILE

    folder = Path(folder)
    for name, read in (("metrics.csv", read_csv), (RECORD_FILE, read_record)):
        try:
            record = read(folder / name)
        except (OSError, ValueError, DataError):
            continue
        for key, values in record.series.items():
            kept = [(step, value) for step, value in values if step < before_step]
            record.series[key] = kept[:: len(kept) // _MAX_VALUES + 1]
        return record
    return None


def continue_history(
    folder: str | Path, point: ResumePoint, *, loggers: Iterable[Any], callbacks: Iterable[Any]
) -> None:
    """Let loggers and the report go on in a folder where an earlier part of the run lies.

    Steps before the checkpoint's stay; later ones are trained again, and dropped.

    Args:
        folder: The run's; left as it is unless the checkpoint lies in it.
        point: The checkpoint.
        loggers: Of the trainer.
        callbacks: Of the trainer.
    """
    from lightning.pytorch.loggers import WandbLogger

    from lightning_entrain.callbacks.report import RunReport
    from lightning_entrain.loggers import StepCSVLogger, continue_wandb_run

    if not point.is_in(folder):
        return
    earlier = earlier_record(folder, point.step)
    for callback in callbacks:
        if isinstance(callback, RunReport):
            callback.earlier = earlier
    for logger in loggers:
        if isinstance(logger, StepCSVLogger):
            logger.keep_before(point.step)
        elif isinstance(logger, WandbLogger) and (run_id := wandb_run_id(folder)):
            continue_wandb_run(logger, run_id)


def wandb_run_id(folder: str | Path) -> str | None:
    """Id of the newest W&B run below a run's folder."""
    folders = sorted(
        path.name.removeprefix("offline-")
        for path in (Path(folder) / "wandb").glob("*run-*")
        if _WANDB_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
    found = _WANDB_FOLDER.fullmatch(folders[-1]) if folders else None
    return found[1] if found else None


def wandb_parts(folder: Path) -> list[Path]:
    """All folders of the W&B run that a folder is a part of, the oldest first."""
    found = _WANDB_FOLDER.fullmatch(folder.name)
    if found is None:
        return [folder]
    parts = folder.parent.glob(f"*run-*-{found[1]}")
    return sorted(parts, key=lambda path: path.name.removeprefix("offline-"))


class NoteResumed(Callback):
    """Tells the W&B run which checkpoint it went on from, as `resumed_from` in its config.

    Args:
        point: The checkpoint.
    """

    def __init__(self, point: ResumePoint) -> None:
        self.point = point

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it down."""
        from lightning.pytorch.loggers import WandbLogger

        note = {"path": str(self.point.path), "step": self.point.step}
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.config.update({"resumed_from": note}, allow_val_change=True)


def interrupted_checkpoint(trainer: pl.Trainer) -> Path:
    """Where a pipeline that is asked to stop saves."""
    from lightning_entrain.runtime.stopping import INTERRUPTED

    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    return Path(folder) / INTERRUPTED


def remove_passed_checkpoint(trainer: pl.Trainer, newest: Path | None) -> None:
    """Remove an `interrupted.ckpt` that the run has passed, once there is a newer checkpoint."""
    from lightning_entrain.checkpoint.files import remove_whole

    path = interrupted_checkpoint(trainer)
    if newest is None or not path.exists() or newest.resolve() == path.resolve():
        return
    try:
        old, new = ResumePoint.read(path), ResumePoint.read(newest)
    except (CheckpointError, OSError):
        return
    if old is not None and new is not None and old.step <= new.step:
        remove_whole(path)
