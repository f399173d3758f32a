"""Why ranks were idle: filling and draining, imbalance, or waiting for transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_entrain.observe.step_trace import ReplicaTrace, StepTrace, compute_end_ms
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.types import Action, ActionKind, Schedule

Durations = Callable[[int, Action], float]
"""Milliseconds of an action of a rank."""


@dataclass(frozen=True, kw_only=True)
class RankIdle:
    """One rank's time in a step, in milliseconds; the four add up to the step.

    Attributes:
        busy_ms: In compute actions.
        fill_drain_ms: Idle that the schedule has even where all work is equal: the pipeline fills
            and drains.
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


def split_idle(trace: StepTrace) -> StepIdle:
    """Split each rank's idle time by asking what would be left of it.

    The replica's schedule is run again twice in predicted time. With each action as long as it was
    measured but transfers that take no time, the step shortens: that part was communication. With
    all work equal, too (each kind of action has one duration, each rank the same total), what idle
    time is left is the schedule's own: it fills and drains. The rest is imbalance, among it the
    wait for a slower replica. The parts are not negative and add up to the measured idle time.

    Args:
        trace: A measured step.
    """
    step_ms = trace.step_ms
    ranks: list[RankIdle] = []
    for replica in trace.replicas:
        ranks += _split_replica(replica, step_ms)
    return StepIdle(step_ms=step_ms, ranks=tuple(ranks))


def _split_replica(replica: ReplicaTrace, step_ms: float) -> list[RankIdle]:
    measured_ms = compute_end_ms(replica.timeline)
    took = durations_of(replica)
    graph = StepGraph(replica.schedule.placement, replica.rows)
    ranks = replica.schedule.ranks
    without_transfers_ms = run_in_time(graph, ranks, lambda r, a: took[r, a])
    communication = max(measured_ms - without_transfers_ms, 0.0)
    even = even_durations(replica.schedule, took)
    busy = [sum(took[r, action] for action in own) for r, own in enumerate(ranks)]
    even_busy = sum(busy) / len(busy)
    fill_drain = max(run_in_time(graph, ranks, lambda r, a: even[r, a]) - even_busy, 0.0)
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


def even_durations(
    schedule: Schedule, took: Mapping[tuple[int, Action], float]
) -> dict[tuple[int, Action], float]:
    """Durations of equal work: one per kind, scaled so that all ranks are busy equally long."""
    sums: dict[ActionKind, list[float]] = {}
    for (_, action), duration in took.items():
        entry = sums.setdefault(action.kind, [0.0, 0.0])
        entry[0] += duration
        entry[1] += 1
    means = {kind: total / count for kind, (total, count) in sums.items()}
    target = sum(took.values()) / max(len(schedule.ranks), 1)
    even = {}
    for rank, own in enumerate(schedule.ranks):
        total = sum(means[action.kind] for action in own)
        factor = target / total if total else 0.0
        for action in own:
            even[rank, action] = means[action.kind] * factor
    return even


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
