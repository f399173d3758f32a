"""When each action of a step ran, on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_entrain.runtime.activity import Activity
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Action


class StepRecorder:
    """Notes begin and end of every compute action, and of every wait for a message.

    On CUDA it records events on the compute stream, read once the step is over: nothing waits for
    the device while the step runs.

    Args:
        rank: The rank that rows are filed under.
        device: The rank's device.
        activity: What this rank does, for others to see.

    Attributes:
        activity: Told of every action and wait, too.
        began_at: Begin of the step by the host's clock, seconds since 1970: what the ranks of a
            host have in common.
        drain_ms: How long the host waited at the end until its last sends were received.
    """

    def __init__(self, rank: int, device: torch.device, activity: Activity | None = None) -> None:
        self._rank = rank
        self.activity = activity if activity is not None else Activity()
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        self._waits: list[tuple[Action, Any, Any]] = []
        self.began_at = time.time()
        self.drain_ms = 0.0
        self._begin = self._mark()

    @contextmanager
    def computing(self, action: Action) -> Iterator[None]:
        """Time a compute action."""
        self.activity.enter(action)
        begin = self._mark()
        yield
        self._marks.append((action, begin, self._mark()))

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        """Time the wait for a message, filed under its transfer action."""
        self.activity.enter(action, waits=True)
        begin = self._mark()
        yield
        self._waits.append((action, begin, self._mark()))

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Time the wait for sends that are still in flight after the last action."""
        self.activity.enter("the wait for its last sends", waits=True)
        begin = time.perf_counter()
        yield
        self.drain_ms += (time.perf_counter() - begin) * 1e3

    def timeline(self) -> Timeline:
        """Rows of this rank alone: compute actions and waits, by start."""
        if self._cuda:
            torch.cuda.synchronize()
        rows = [
            TimelineRow(self._rank, action, self._since(begin), self._since(end))
            for action, begin, end in (*self._marks, *self._waits)
        ]
        return Timeline(
            rows=tuple(sorted(rows, key=lambda row: row.start_ms)), num_ranks=self._rank + 1
        )

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        if self._cuda:
            return float(self._begin.elapsed_time(mark))
        return float(mark - self._begin) * 1e3
