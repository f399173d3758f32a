"""The trace of a step, gathered once however many monitors look at it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import lightning.pytorch as pl

from lightning_entrain.observe.step_trace import StepTrace, gather_trace

_gathered: WeakKeyDictionary[pl.Trainer, tuple[int, StepTrace | None]] = WeakKeyDictionary()


def has_pipeline(trainer: pl.Trainer) -> bool:
    """Whether the strategy records its steps."""
    return hasattr(trainer.strategy, "last_recorder")


def step_trace(trainer: pl.Trainer) -> StepTrace | None:
    """The last step of all ranks, on rank 0; None on other ranks, and without a pipeline.

    All ranks call it at the same steps; it communicates once per step.
    """
    if not has_pipeline(trainer):
        return None
    batch = trainer.fit_loop.total_batch_idx
    known = _gathered.get(trainer)
    if known is None or known[0] != batch:
        known = batch, gather_trace(trainer.strategy)
        _gathered[trainer] = known
    return known[1]


def last_trace(trainer: pl.Trainer) -> StepTrace | None:
    """The newest trace that was gathered; communicates nothing."""
    known = _gathered.get(trainer)
    return None if known is None else known[1]
