"""What is known of a run once it has ended: the content of its report, to and from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_entrain.errors import DataError
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Action

RECORD_FILE = "run_record.json"
REPORT_FILE = "report.html"
_VERSION = 1

Series = list[tuple[int, float]]


@dataclass(kw_only=True)
class RunRecord:
    """A run as its report shows it. Whatever is unknown stays empty.

    Attributes:
        name: Of the run.
        status: ``finished``, or how it ended.
        policy: Assignment policy.
        schedule: Name of the last step's schedule.
        layout: Stages in one line.
        num_steps: Optimizer steps done.
        environment: Versions, device, ranks.
        plan: The plan's record.
        series: Logged values by key, as (step, value).
        loads: Per module and microbatch the loads of the kept steps, replicas one after another.
        load_unit: ``ms``, or ``patches and tokens``.
        rank_names: What each rank holds.
        measured: Last step's timeline.
        simulated: The same step in simulated time.
        timeline_step: Which step that was.
        idle: Per rank busy, fill and drain, imbalance, communication, in ms.
        policies: Simulated step time, spreads and schedule per policy; the run as it was as
            ``this run``.
        num_compared: Batches that the policies were compared on.
        memory_gib: Peak per rank.
        predicted_memory_gib: Per stage of the plan.
        advice: Sentences.
    """

    name: str = ""
    status: str = "finished"
    policy: str = ""
    schedule: str = ""
    layout: str = ""
    num_steps: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    loads: dict[str, list[list[float]]] = field(default_factory=dict)
    load_unit: str = "ms"
    rank_names: list[str] = field(default_factory=list)
    measured: Timeline | None = None
    simulated: Timeline | None = None
    timeline_step: int = 0
    idle: list[list[float]] = field(default_factory=list)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_compared: int = 0
    memory_gib: list[float] = field(default_factory=list)
    predicted_memory_gib: list[float] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def last(self, key: str) -> float | None:
        """The newest value of a series."""
        values = self.series.get(key)
        return values[-1][1] if values else None

    def mean(self, key: str) -> float | None:
        """The mean of a series' finite values."""
        values = [value for _, value in self.series.get(key, ()) if math.isfinite(value)]
        return math.fsum(values) / len(values) if values else None

    def to_json(self) -> str:
        """The record as text."""
        plain = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("measured", "simulated")
        }
        plain["version"] = _VERSION
        plain["measured"] = _timeline_to(self.measured)
        plain["simulated"] = _timeline_to(self.simulated)
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Inverse of :meth:`to_json`.

        Raises:
            DataError: If the text is no such record.
        """
        try:
            plain = json.loads(text)
            if plain.pop("version") != _VERSION:
                raise ValueError("another version")
            plain["measured"] = _timeline_from(plain["measured"])
            plain["simulated"] = _timeline_from(plain["simulated"])
            plain["series"] = {
                key: [(int(step), float(value)) for step, value in values]
                for key, values in plain["series"].items()
            }
            return cls(**plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"The record of a run cannot be read ({error})",
                limit=f"a {RECORD_FILE} of version {_VERSION}",
                remedy="delete it; the report is then made from the logged values alone",
            ) from error


def _timeline_to(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    rows = [
        [row.rank, str(row.action), round(row.start_ms, 4), round(row.end_ms, 4)]
        for row in timeline.rows
    ]
    return {"num_ranks": timeline.num_ranks, "rows": rows}


def _timeline_from(record: Mapping[str, Any] | None) -> Timeline | None:
    if record is None:
        return None
    rows = tuple(
        TimelineRow(int(rank), Action.parse(action), float(start), float(end))
        for rank, action, start, end in record["rows"]
    )
    return Timeline(rows=rows, num_ranks=int(record["num_ranks"]))


def loads_by_microbatch(
    steps: Sequence[Sequence[tuple[int, str, Sequence[float]]]],
) -> dict[str, list[list[float]]]:
    """Loads of kept steps, gathered per module and microbatch."""
    found: dict[str, list[list[float]]] = {}
    for kept in steps:
        for _, module, loads in kept:
            slots = found.setdefault(module, [])
            for index, load in enumerate(loads):
                if index == len(slots):
                    slots.append([])
                slots[index].append(float(load))
    return found


def policies_to_dict(outcomes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Outcomes of policies as plain values."""
    return {name: asdict(outcome) for name, outcome in outcomes.items()}
