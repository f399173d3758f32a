"""Why ranks were idle: filling and draining, imbalance, or waiting for transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_entrain.errors import ScheduleError
from lightning_entrain.observe.step_trace import ReplicaTrace, StepTrace, compute_end_ms
from lightning_entrain.runtime.step_plan import live_cap
from lightning_entrain.schedule.choose import FAMILIES, choose_schedule
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts, Schedule

Durations = Callable[[int, Action], float]
"""Milliseconds of an action of a rank."""

_NUM_STEPS = 100
"""Effort of the search for the best schedule of equal work."""


@dataclass(frozen=True, kw_only=True)
class RankIdle:
    """One rank's time in a step, in milliseconds; the four add up to the step.

    Attributes:
        busy_ms: In compute actions.
        fill_drain_ms: Idle that the best schedule for equal work has, too: the pipeline fills and
            drains.
        imbalance_ms: Idle that equal microbatches, stages and replicas would not have.
        communication_ms: Idle that transfers without duration would not have, and what the
            runtime itself takes between actions.
    """

    busy_ms: float
    fill_drain_ms: float
    imbalance_ms: float
    communication_ms: float

    @property
    def idle_ms(self) -> float:
        """The three parts together."""
        return self.fill_drain_ms + self.imbalance_ms + self.communication_ms


@dataclass(frozen=True, kw_only=True)
class StepIdle:
    """All ranks' time in a step.

    Attributes:
        step_ms: From the first begin to the last compute action's end.
        ranks: By global rank.
    """

    step_ms: float
    ranks: tuple[RankIdle, ...]

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return self._ratio("idle_ms")

    @property
    def fill_drain_ratio(self) -> float:
        """Share of all ranks' time that filling and draining take."""
        return self._ratio("fill_drain_ms")

    @property
    def imbalance_ratio(self) -> float:
        """Share of all ranks' time that is lost to unequal work."""
        return self._ratio("imbalance_ms")

    @property
    def communication_ratio(self) -> float:
        """Share of all ranks' time that is lost to transfers and overhead."""
        return self._ratio("communication_ms")

    def _ratio(self, name: str) -> float:
        total = self.step_ms * len(self.ranks)
        return sum(getattr(rank, name) for rank in self.ranks) / total if total else 0.0


def split_idle(trace: StepTrace, *, may_split: bool = False) -> StepIdle:
    """Split each rank's idle time by asking what would be left of it.

    Communication: with each action as long as it was measured but transfers that take no time,
    the replica's schedule is shorter by this. Fill and drain: what the best schedule idles where
    all work is equal, every microbatch and every rank, with as many microbatches on the same
    stages; it is chosen anew, for a schedule that was chosen for unequal work would not be used
    then. The rest is imbalance: unequal microbatches, stages, and the wait for a slower replica.
    The parts are not negative and add up to the measured idle time.

    Args:
        trace: A measured step.
        may_split: Whether the best schedule for equal work may split B into I and W although the
            one that ran does not, as where each step's is chosen.
    """
    step_ms = trace.step_ms
    ranks: list[RankIdle] = []
    for replica in trace.replicas:
        ranks += _split_replica(replica, step_ms, may_split)
    return StepIdle(step_ms=step_ms, ranks=tuple(ranks))


def _split_replica(replica: ReplicaTrace, step_ms: float, may_split: bool) -> list[RankIdle]:
    measured_ms = compute_end_ms(replica.timeline)
    took = durations_of(replica)
    graph = StepGraph(replica.schedule.placement, replica.rows)
    ranks = replica.schedule.ranks
    without_transfers_ms = run_in_time(graph, ranks, lambda r, a: took[r, a])
    communication = max(measured_ms - without_transfers_ms, 0.0)
    busy = [sum(took[r, action] for action in own) for r, own in enumerate(ranks)]
    num_microbatches = replica.rows.num_microbatches
    fill_drain = even_idle_ms(replica.schedule, num_microbatches, took, may_split=may_split)
    found = []
    for own_busy in busy:
        # A rank that is busy nearly all the time has less idle time than the parts ask for.
        idle = max(measured_ms - own_busy, 0.0)
        waiting = min(communication, idle)
        filling = min(fill_drain, idle - waiting)
        found.append(
            RankIdle(
                busy_ms=own_busy,
                fill_drain_ms=filling,
                imbalance_ms=idle - waiting - filling + step_ms - measured_ms,
                communication_ms=waiting,
            )
        )
    return found


def durations_of(replica: ReplicaTrace) -> dict[tuple[int, Action], float]:
    """Measured milliseconds of each compute action, by rank and action; 0 where unmeasured."""
    found = {
        (row.rank, row.action): row.duration_ms
        for row in replica.timeline.rows
        if row.action.kind.is_compute
    }
    return {
        (rank, action): found.get((rank, action), 0.0)
        for rank, own in enumerate(replica.schedule.ranks)
        for action in own
    }


def even_idle_ms(
    schedule: Schedule,
    num_microbatches: int,
    took: Mapping[tuple[int, Action], float],
    *,
    may_split: bool = False,
) -> float:
    """Each rank's idle time in the best schedule for equal work.

    Args:
        schedule: The one that ran.
        num_microbatches: K.
        took: What its actions took, in milliseconds, by rank and action.
        may_split: Whether the best one may split B into I and W; it may where this one does.
    """
    placement, count = schedule.placement, num_microbatches
    rows = RowCounts.even(count)
    costs = _even_costs(schedule, count, took)
    kinds = {action.kind for own in schedule.ranks for action in own}
    splits = may_split or bool(kinds & {ActionKind.I, ActionKind.W})
    try:
        found = choose_schedule(
            placement,
            rows,
            costs,
            max_bytes=live_cap(placement),
            families=FAMILIES if splits else ("1f1b",),
            may_reorder=False,
            num_steps=_NUM_STEPS,
        ).simulation
    except ScheduleError:
        found = simulate(build_1f1b(placement, rows), costs, rows)
    return max(found.iteration_ms - sum(took.values()) / len(schedule.ranks), 0.0)


def load_search() -> None:
    """Load the compiled search now, so that the first step that is looked at need not wait."""
    schedule = build_1f1b(Placement.one_per_rank(1, 1), RowCounts.even(1))
    took = {(r, action): 1.0 for r, own in enumerate(schedule.ranks) for action in own}
    even_idle_ms(schedule, 1, took, may_split=True)


def _even_costs(
    schedule: Schedule, num_microbatches: int, took: Mapping[tuple[int, Action], float]
) -> StepCosts:
    """All ranks busy equally long; F, I and W of a stage keep their measured proportions."""
    placement = schedule.placement
    sums = np.zeros((3, placement.num_stages))
    columns = {ActionKind.F: 0, ActionKind.I: 1, ActionKind.W: 2}
    for (_, action), duration in took.items():
        if action.kind in columns:
            sums[columns[action.kind], action.stage] += duration
    gradients = sums[1:].sum()
    input_part = sums[1].sum() / gradients if gradients else 0.5
    for (_, action), duration in took.items():
        if action.kind == ActionKind.B:
            sums[1, action.stage] += duration * input_part
            sums[2, action.stage] += duration * (1 - input_part)
    target = sums.sum() / placement.num_ranks
    mean = sums.sum(axis=1, keepdims=True) / placement.num_stages
    for rank in range(placement.num_ranks):
        own = list(placement.stages_of(rank))
        if not sums[:, own].sum():  # had nothing to do, as an encoder without images
            sums[:, own] = mean
        busy = sums[:, own].sum()
        sums[:, own] *= target / busy if busy else 0.0
    tables = np.repeat(sums[:, :, None] / max(num_microbatches, 1), num_microbatches, axis=2)
    # Of equal microbatches each stage holds its part of its rank's.
    held = [1 / len(placement.stages_of(rank)) for rank in placement.stage_to_rank]
    return StepCosts(
        forward_ms=tables[0],
        input_ms=tables[1],
        weight_ms=tables[2],
        activation_bytes=np.repeat(np.array(held)[:, None], num_microbatches, axis=1),
    )


def run_in_time(graph: StepGraph, ranks: Sequence[Sequence[Action]], duration: Durations) -> float:
    """End of a schedule whose actions take the given time and whose transfers take none.

    Args:
        graph: Data flow.
        ranks: Compute actions per rank.
        duration: Milliseconds of each.
    """
    made: dict[Edge, float] = {}
    waiting: dict[Edge, int] = {}
    position = [0] * len(ranks)
    free_at = [0.0] * len(ranks)
    active = list(range(len(ranks)))
    while active:
        rank = active.pop()
        own = ranks[rank]
        while position[rank] < len(own):
            action = own[position[rank]]
            inputs = [edge for edge in graph.inputs(action) if graph.num_rows(edge)]
            missing = next((edge for edge in inputs if edge not in made), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max([free_at[rank], *(made[edge] for edge in inputs)])
            free_at[rank] = start + duration(rank, action)
            position[rank] += 1
            for edge in graph.outputs(action):
                made[edge] = free_at[rank]
                if edge in waiting:
                    active.append(waiting.pop(edge))
    return max(free_at, default=0.0)
