"""What each rank did when: the record that the simulator and the runtime both produce."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_entrain.schedule.types import Action


class TimelineRow(NamedTuple):
    """One action of one rank.

    Attributes:
        rank: Who did it.
        action: What it was.
        start_ms: Begin, in milliseconds since the step began.
        end_ms: End, in milliseconds since the step began.
    """

    rank: int
    action: Action
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All actions of a step.

    Attributes:
        rows: By rank, then start.
        num_ranks: Ranks of the step, idle ones included.
    """

    rows: tuple[TimelineRow, ...]
    num_ranks: int

    @property
    def iteration_ms(self) -> float:
        """End of the last action; 0 without actions."""
        return max((row.end_ms for row in self.rows), default=0.0)

    def busy_ms(self) -> tuple[float, ...]:
        """Per rank the time spent in compute actions."""
        busy = [0.0] * self.num_ranks
        for row in self.rows:
            if row.action.kind.is_compute:
                busy[row.rank] += row.end_ms - row.start_ms
        return tuple(busy)

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time in which they do not compute; 0 without actions."""
        total = self.num_ranks * self.iteration_ms
        return 1.0 - sum(self.busy_ms()) / total if total else 0.0

    @classmethod
    def side_by_side(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Replicas as one timeline: the ranks of each follow those of the one before."""
        rows: list[TimelineRow] = []
        num_ranks = 0
        for timeline in timelines:
            rows += [row._replace(rank=row.rank + num_ranks) for row in timeline.rows]
            num_ranks += timeline.num_ranks
        return cls(rows=tuple(rows), num_ranks=num_ranks)
