"""The trace of a step, gathered once however many monitors look at it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl

from lightning_entrain.observe.step_trace import StepTrace, gather_trace, rank_record

_Step = tuple[int, Any, Any]
"""Number of the batch, the step's plan and its recorder."""

_noted: WeakKeyDictionary[pl.Trainer, _Step] = WeakKeyDictionary()
_gathered: WeakKeyDictionary[pl.Trainer, tuple[int, StepTrace | None]] = WeakKeyDictionary()


def has_pipeline(trainer: pl.Trainer) -> bool:
    """Whether the strategy records its steps."""
    return hasattr(trainer.strategy, "last_recorder")


def note_step(trainer: pl.Trainer) -> None:
    """Keep what the training step left, before a validation replaces it; costs nothing."""
    strategy: Any = trainer.strategy
    plan, recorder = strategy.last_step_plan, strategy.last_recorder
    if plan is not None and plan.train:
        _noted[trainer] = trainer.fit_loop.total_batch_idx, plan, recorder


def step_trace(trainer: pl.Trainer) -> StepTrace | None:
    """The noted step of all ranks, on rank 0; None on other ranks, and without a pipeline.

    All ranks call it at the same steps; it communicates once per step.
    """
    noted = _noted.get(trainer)
    if noted is None:
        return None
    batch, plan, recorder = noted
    known = _gathered.get(trainer)
    if known is None or known[0] != batch:
        record = rank_record(trainer.strategy, plan, recorder)
        known = batch, gather_trace(trainer.strategy, record)
        _gathered[trainer] = known
    return known[1]


def last_trace(trainer: pl.Trainer) -> StepTrace | None:
    """The newest trace that was gathered; communicates nothing."""
    known = _gathered.get(trainer)
    return None if known is None else known[1]
