"""The values that monitors logged, by step: kept in memory for the report at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import lightning.pytorch as pl

_MAX_STEPS = 4096


class StepHistory:
    """Logged values by step; long runs are thinned out evenly.

    Args:
        max_steps: Above this number of steps every second one is dropped, and so on.

    Attributes:
        rows: Kept values by step and key.
        newest_step: By key the step of its newest value, kept or not.
    """

    def __init__(self, max_steps: int = _MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._stride = 1
        self.rows: dict[int, dict[str, float]] = {}
        self.newest_step: dict[str, int] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep values of a step, beside those it has already."""
        self.newest_step.update(dict.fromkeys(values, step))
        if step % self._stride:
            return
        self.rows.setdefault(step, {}).update(values)
        if len(self.rows) > self._max_steps:
            self._stride *= 2
            self.rows = {s: row for s, row in self.rows.items() if s % self._stride == 0}

    def series(self, key: str) -> list[tuple[int, float]]:
        """Steps and values of one key, by step."""
        return [(step, row[key]) for step, row in sorted(self.rows.items()) if key in row]

    def last(self, key: str) -> float | None:
        """The newest value of a key."""
        found = self.series(key)
        return found[-1][1] if found else None


_HISTORIES: WeakKeyDictionary[pl.Trainer, StepHistory] = WeakKeyDictionary()


def history_of(trainer: pl.Trainer) -> StepHistory:
    """The history that all monitors of a trainer share."""
    return _HISTORIES.setdefault(trainer, StepHistory())
