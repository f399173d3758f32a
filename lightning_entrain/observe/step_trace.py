"""What all ranks did in one step, put together from their own records."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import RowCounts, Schedule


@dataclass(frozen=True, kw_only=True)
class ReplicaTrace:
    """One replica's step, as it was planned and as it ran.

    Attributes:
        schedule: Its compute actions.
        rows: Rows per microbatch.
        timeline: Compute actions and waits, ranks counted inside the replica, in milliseconds
            since the step began anywhere in the job.
    """

    schedule: Schedule
    rows: RowCounts
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step of all replicas.

    Attributes:
        replicas: By replica.
        planning_ms: Longest time that planning the step took on a rank.
    """

    replicas: tuple[ReplicaTrace, ...]
    planning_ms: float

    @property
    def step_ms(self) -> float:
        """End of the last compute action."""
        return max((compute_end_ms(r.timeline) for r in self.replicas), default=0.0)

    @property
    def timeline(self) -> Timeline:
        """All replicas; a rank's number is its global rank."""
        return Timeline.side_by_side(r.timeline for r in self.replicas)


def compute_end_ms(timeline: Timeline) -> float:
    """End of the last compute action; 0 without one."""
    return max((row.end_ms for row in timeline.rows if row.action.kind.is_compute), default=0.0)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank tells of its last step; crosses process borders.

    Attributes:
        replica: Its replica.
        host: Its machine.
        began_at: Begin of its step by the machine's clock, seconds.
        timeline: Its own rows.
        plan: Schedule and rows, from the replica's first rank only.
        planning_ms: Time to plan the step.
    """

    replica: int
    host: str
    began_at: float
    timeline: Timeline
    plan: tuple[Schedule, RowCounts] | None
    planning_ms: float


def rank_record(strategy: Any, plan: Any, recorder: Any) -> RankRecord:
    """This rank's record of a training step.

    Args:
        strategy: An :class:`EntrainStrategy`.
        plan: The step's plan.
        recorder: When its actions ran.
    """
    replica, rank = strategy.layout.split(strategy.global_rank)
    return RankRecord(
        replica=replica,
        host=platform.node(),
        began_at=recorder.began_at,
        timeline=recorder.timeline(),
        plan=(compute_only(plan.program.schedule), plan.rows) if rank == 0 else None,
        planning_ms=plan.planning_ms,
    )


def gather_trace(strategy: Any, record: RankRecord) -> StepTrace | None:
    """A step of all ranks, on rank 0; None on the others. All ranks call it together."""
    records = strategy.gather_on_rank_zero(record)
    return None if records is None else join_records(records)


def compute_only(schedule: Schedule) -> Schedule:
    """A lowered schedule without its transfers."""
    ranks = tuple(tuple(a for a in own if a.kind.is_compute) for own in schedule.ranks)
    return Schedule(
        name=schedule.name,
        placement=schedule.placement,
        ranks=ranks,
        forward_only=schedule.forward_only,
    )


def join_records(records: Sequence[RankRecord]) -> StepTrace:
    """Put ranks on one time axis and replicas together.

    Ranks of one machine share its clock. Machines are aligned by their first begin: the ranks
    have just compared their plans then, so they begin within a message of each other.

    Args:
        records: By global rank.
    """
    first: dict[str, float] = {}
    for record in records:
        first[record.host] = min(first.get(record.host, record.began_at), record.began_at)
    rows: dict[int, list[TimelineRow]] = {}
    plans: dict[int, tuple[Schedule, RowCounts]] = {}
    for record in records:
        offset_ms = (record.began_at - first[record.host]) * 1e3
        if record.plan is not None:
            plans[record.replica] = record.plan
        rows.setdefault(record.replica, []).extend(
            row._replace(start_ms=row.start_ms + offset_ms, end_ms=row.end_ms + offset_ms)
            for row in record.timeline.rows
        )
    replicas = tuple(
        ReplicaTrace(
            schedule=plans[replica][0],
            rows=plans[replica][1],
            timeline=Timeline(
                rows=tuple(sorted(own, key=lambda row: (row.rank, row.start_ms))),
                num_ranks=len(plans[replica][0].ranks),
            ),
        )
        for replica, own in sorted(rows.items())
    )
    return StepTrace(replicas=replicas, planning_ms=max(r.planning_ms for r in records))


def stage_name(stage: int, num_encoder_stages: int) -> str:
    """Name of a stage for people, counted inside its module."""
    if stage < num_encoder_stages:
        return f"encoder stage {stage}"
    return f"LLM stage {stage - num_encoder_stages}"
