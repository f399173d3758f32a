"""The loads of single microbatches at evenly spread steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = tuple[int, int, str, int, float]


class LoadTable:
    """Keeps the loads of at most so many steps, evenly spread over the run so far.

    Args:
        max_steps: Steps kept; when they are reached, every second one is dropped.
    """

    COLUMNS = ("step", "replica", "module", "microbatch", "load")

    def __init__(self, max_steps: int = 64) -> None:
        self._max_steps = max(2, max_steps)
        self._stride = 1
        self.steps: dict[int, list[tuple[int, str, tuple[float, ...]]]] = {}

    def add(self, step: int, loads: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Keep a step's loads.

        Args:
            step: Its number.
            loads: Per module and replica the loads of the microbatches, any unit.
        """
        if step % self._stride:
            return
        self.steps[step] = [
            (replica, module, tuple(own))
            for module, by_replica in loads.items()
            for replica, own in enumerate(by_replica)
        ]
        if len(self.steps) > self._max_steps:
            self._stride *= 2
            self.steps = {s: kept for s, kept in self.steps.items() if s % self._stride == 0}

    def rows(self) -> list[Row]:
        """One row per microbatch: step, replica, module, microbatch, load."""
        return [
            (step, replica, module, index, load)
            for step, kept in sorted(self.steps.items())
            for replica, module, loads in kept
            for index, load in enumerate(loads)
        ]
