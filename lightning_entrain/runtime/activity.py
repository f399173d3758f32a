"""What a rank is doing, for the others to tell when they have waited too long for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

BETWEEN = "the code between steps (data, optimizer, callbacks)"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank said of itself.

    Durations and a counter: the clocks of two machines may differ.

    Attributes:
        what: Action, or part of a step, in words.
        waits: Whether it waits for other ranks there.
        stands_seconds: For how long it had been there when it said so.
        count: How often it has said something.
    """

    what: str
    waits: bool
    stands_seconds: float
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Report:
        """Inverse of :meth:`to_dict`."""
        return cls(**record)


class Activity:
    """Notes what this rank does now; read from another thread.

    Entering costs an assignment, so that the executor may do it for each action. Words are made
    only when somebody asks.
    """

    def __init__(self) -> None:
        self._now: tuple[object, bool, float] = ("the start of the job", False, time.monotonic())
        self._num_reports = 0

    def enter(self, what: object, *, waits: bool = False) -> None:
        """From now on the rank does this.

        Args:
            what: An action or a description; ``str`` of it is told to others.
            waits: Whether it waits for other ranks.
        """
        self._now = (what, waits, time.monotonic())

    @contextmanager
    def during(self, what: object, *, waits: bool = False) -> Iterator[None]:
        """Enter, and go back to what was before; after an error, stay: that is where it was."""
        before, waited, _ = self._now
        self.enter(what, waits=waits)
        yield
        self.enter(before, waits=waited)

    @property
    def waits_for(self) -> object | None:
        """What the rank waits for now, as it was entered; None if it does not wait."""
        what, waits, _ = self._now
        return what if waits else None

    def report(self) -> Report:
        """What the rank does at this moment."""
        what, waits, since = self._now
        self._num_reports += 1
        return Report(
            what=str(what),
            waits=waits,
            stands_seconds=time.monotonic() - since,
            count=self._num_reports,
        )


def suspects(
    before: Mapping[int, Report],
    after: Mapping[int, Report],
    between_seconds: float,
    *,
    longer_than: float | None,
) -> list[tuple[int, str]]:
    """Ranks that others may be waiting for, and what they were last known to do.

    Args:
        before: Reports by global rank.
        after: The same, read again.
        between_seconds: Time from the one to the other, in which a live rank reports several times.
        longer_than: Seconds in one place that are too many; None to name silent ranks only.

    Returns:
        Rank and text, those that stand still longest first.
    """
    found = []
    for rank, report in after.items():
        stands = report.stands_seconds
        if rank in before and before[rank].count == report.count:
            stands += between_seconds
            text = f"rank {rank} no longer reports, and was in {report.what}"
        elif longer_than is not None and not report.waits and stands > longer_than:
            text = f"rank {rank} has been in {report.what} for {stands:.0f} s"
        else:
            continue
        found.append((stands, rank, text))
    return [(rank, text) for _, rank, text in sorted(found, reverse=True)]


def in_words(found: Sequence[tuple[int, str]], at_most: int = 4) -> str:
    """The first of the suspects, in one sentence."""
    texts = [text for _, text in found[:at_most]]
    if len(found) > at_most:
        texts.append(f"and {len(found) - at_most} more")
    return "; ".join(texts)
