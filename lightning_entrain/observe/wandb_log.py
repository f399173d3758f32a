"""What W&B gets beyond plain values: sections, tables, pictures, files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl

STEP_METRIC = "trainer/global_step"
"""The step that `WandbLogger` logs with every value."""

SUMMARIES: dict[str, str] = {
    "variability/*": "mean,max",
    "pipeline/*": "mean,max",
    "throughput/*": "mean,max",
    "memory/*": "max",
    "plan/*": "last",
}
"""Per section what the run's summary keeps of a value."""

_defined: WeakSet[Any] = WeakSet()


def wandb_runs(trainer: pl.Trainer) -> list[Any]:
    """The open W&B runs among the trainer's loggers; none on other ranks than 0."""
    from lightning.pytorch.loggers import WandbLogger

    if not trainer.is_global_zero:
        return []
    runs = [log.experiment for log in trainer.loggers if isinstance(log, WandbLogger)]
    return [run for run in runs if not getattr(run, "disabled", False)]


def define_sections(trainer: pl.Trainer) -> None:
    """Tell W&B the step metric and the summary of each section, once per run."""
    for run in wandb_runs(trainer):
        if run in _defined:
            continue
        _defined.add(run)
        for pattern, summary in SUMMARIES.items():
            run.define_metric(pattern, step_metric=STEP_METRIC, summary=summary)


def log_table(
    trainer: pl.Trainer, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Log a table as `tables/<name>`."""
    import wandb

    for run in wandb_runs(trainer):
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        run.log({f"tables/{name}": table})


def log_page(trainer: pl.Trainer, key: str, html: str, step: int) -> None:
    """Log a self-contained page, as it is, at an optimizer step."""
    import wandb

    for run in wandb_runs(trainer):
        run.log({key: wandb.Html(html, inject=False), STEP_METRIC: step})


def log_file(trainer: pl.Trainer, path: Path, *, kind: str) -> None:
    """Log a file as an artifact of its own, named after the run."""
    import wandb

    for run in wandb_runs(trainer):
        artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
        artifact.add_file(str(path))
        run.log_artifact(artifact)
