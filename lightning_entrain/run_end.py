"""How a run ends: what it leaves behind, and its exit status if it was asked to stop."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_entrain.callbacks.summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run leaves behind.

    Attributes:
        run_dir: Folder of the run.
        summary: Counts, losses and rates.
        trainer: The trainer, after its fit.
        wandb_dir: Folder of the W&B run, if there is one.
        wandb_url: Address of the W&B run, if it was uploaded.
        num_devices: Processes of the run, on all machines.
        started: When the fit began, as :func:`time.time` tells it.
        stopped: Whether it was asked to end before its time, by Ctrl-C or a signal.
    """

    run_dir: Path
    summary: RunSummary
    trainer: pl.Trainer
    wandb_dir: Path | None
    wandb_url: str | None
    num_devices: int
    started: float = 0.0
    stopped: bool = False


class RunStopped(SystemExit):
    """The end of a run by Ctrl-C or a signal.

    Args:
        code: Exit status.
        result: What the run leaves behind; None on other ranks than 0.
    """

    def __init__(self, code: int, result: RunResult | None) -> None:
        super().__init__(code)
        self.result = result


INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""


def stop_code(error: BaseException) -> int | None:
    """Exit status of a training that was asked to stop; None if it ended otherwise."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    if isinstance(error, SIGTERMException):
        return error.code if isinstance(error.code, int) and error.code else 128 + signal.SIGTERM
    by_lightning = isinstance(error, SystemExit) and isinstance(
        error.__context__, KeyboardInterrupt
    )
    return INTERRUPTED if by_lightning or isinstance(error, KeyboardInterrupt) else None


def end_failed_job(trainer: pl.Trainer) -> None:
    """Close what a failed fit left open, so that this process can end at once.

    The strategy has told the other ranks. Its watch would end this process, too, and print the
    error a second time.
    """
    _stop_watch(trainer)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=1)


def _stop_watch(trainer: pl.Trainer) -> None:
    watch = getattr(trainer.strategy, "_watch", None)
    if watch is not None:
        watch.stop()


def end_run(
    trainer: pl.Trainer,
    summary: RunSummary,
    run_dir: str | Path,
    *,
    started: float,
    code: int | None = None,
) -> RunResult | None:
    """Close what a fit left open that finished, or stopped when it was asked to.

    Args:
        trainer: After its fit.
        summary: Of the fit.
        run_dir: The run's folder.
        started: When the fit began.
        code: Exit status of a run that was stopped.

    Returns:
        The result on rank 0; None on other ranks.
    """
    from lightning_entrain.runtime.multirun import end_job, in_sweep

    if code is not None:
        _stop_watch(trainer)
    wandb_dir, wandb_url = _finish_wandb(code or 0)
    if code is None and in_sweep():
        end_job(trainer)
    if trainer.global_rank != 0:
        return None
    return RunResult(
        run_dir=Path(run_dir),
        summary=summary,
        trainer=trainer,
        wandb_dir=wandb_dir,
        wandb_url=wandb_url,
        num_devices=trainer.world_size,
        started=started,
        stopped=code is not None,
    )


def _finish_wandb(exit_code: int = 0) -> tuple[Path | None, str | None]:
    """Close the W&B run of this process, and tell where it lies."""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if wandb is None or run is None:
        return None, None
    disabled = getattr(run, "disabled", False)
    folder, url = Path(run.dir).parent, None if run.offline else run.url
    wandb.finish(exit_code=exit_code)
    return (None, None) if disabled else (folder, url)
