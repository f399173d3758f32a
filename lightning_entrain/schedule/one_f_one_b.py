"""One forward, one backward (1F1B), for any placement, and forward alone.

The order is derived by a deterministic event simulation in which each action takes one unit of
time: backward first, and at most S-s microbatches in flight on stage s of S. With one stage per
rank this is the usual order; with several it stays legal by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts, Schedule

F, B = ActionKind.F, ActionKind.B


def build_1f1b(
    placement: Placement,
    rows: RowCounts,
    *,
    split_backward: bool = False,
    caps: Sequence[int] | None = None,
) -> Schedule:
    """1F1B over all stages of both modules (Entrain, section 5.3, arXiv 2605.27918).

    Args:
        placement: Which rank holds which stage.
        rows: Rows per microbatch; empty microbatches get no action.
        split_backward: Back-propagate the segments of an encoder microbatch apart, each as soon
            as its gradient arrives: those that end in LLM microbatch j together. Changes nothing
            where no sample is deferred.
        caps: Microbatches in flight allowed per stage; default S-s. Larger caps on encoder
            stages are the paper's eager forward.

    Returns:
        A schedule of compute actions.

    Raises:
        ScheduleError: If the caps are too small for any order.
    """
    num_stages = placement.num_stages
    limits = [num_stages - s for s in range(num_stages)] if caps is None else list(caps)
    if len(limits) != num_stages or min(limits) < 1:
        raise ScheduleError(
            f"In-flight caps {limits}", limit=f"one number, at least 1, for each of {num_stages}"
        )
    ranks = _GreedyOrder(placement, rows, limits, split_backward=split_backward).run()
    return Schedule(name="1f1b", placement=placement, ranks=ranks)


def build_forward_only(placement: Placement, rows: RowCounts) -> Schedule:
    """Forward of every microbatch, for validation and prediction."""
    order = _GreedyOrder(placement, rows, None, split_backward=False)
    return Schedule(name="forward_only", placement=placement, ranks=order.run(), forward_only=True)


class _GreedyOrder:
    """Unit-time simulation that picks each rank's next action."""

    def __init__(
        self,
        placement: Placement,
        rows: RowCounts,
        caps: list[int] | None,
        *,
        split_backward: bool,
    ) -> None:
        self.graph = graph = StepGraph(placement, rows)
        self.placement = placement
        self.caps = caps
        stages = range(placement.num_stages)
        self.forwards = [[Action(s, F, m) for m in graph.microbatches(s)] for s in stages]
        self.backwards: list[list[tuple[Action, ...]]] = [[] for _ in stages]
        if caps is not None:
            self.backwards = [
                _backward_order(graph, s, split_backward) if graph.needs_backward(s) else []
                for s in stages
            ]
        self.next_forward = [0] * placement.num_stages
        self.next_backward = [0] * placement.num_stages
        self.in_flight = [0] * placement.num_stages
        self.pieces: dict[tuple[int, int], int] = {}
        for own in self.backwards:
            for action in itertools.chain.from_iterable(own):
                key = action.stage, action.microbatch
                self.pieces[key] = self.pieces.get(key, 0) + 1
        self._hold_until_consumed()
        self.done: set[Edge] = set()
        self.forwarded: set[tuple[int, int]] = set()

    def run(self) -> tuple[tuple[Action, ...], ...]:
        num_ranks = self.placement.num_ranks
        holders = [self.placement.stages_of(rank) for rank in range(num_ranks)]
        lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        left = sum(map(len, self.forwards)) + sum(map(len, self.backwards))
        while left:
            # Choose for every rank before any finishes: a unit's results are seen only after it.
            chosen = [(r, self._choose(holders[r])) for r in range(num_ranks)]
            started = [(rank, actions) for rank, actions in chosen if actions]
            if not started:
                self._raise_stuck()
            for rank, actions in started:
                lists[rank].extend(actions)
                self._finish(actions)
            left -= len(started)
        return tuple(map(tuple, lists))

    def _choose(self, stages: Sequence[int]) -> tuple[Action, ...]:
        ready = [group for s in stages if (group := self._ready_backward(s))]
        if ready:
            return min(ready, key=lambda group: (group[0].microbatch, -group[0].stage))
        ready = [group for s in stages if (group := self._ready_forward(s))]
        # Deepest stage first: what is begun reaches its backward before more is begun.
        return max(ready, key=lambda group: group[0].stage) if ready else ()

    def _ready_backward(self, stage: int) -> tuple[Action, ...]:
        index = self.next_backward[stage]
        if index == len(self.backwards[stage]):
            return ()
        group = self.backwards[stage][index]
        for action in group:
            if (stage, action.microbatch) not in self.forwarded:
                return ()
            if not self.done.issuperset(self.graph.inputs(action)):
                return ()
        return group

    def _ready_forward(self, stage: int) -> tuple[Action, ...]:
        index = self.next_forward[stage]
        if index == len(self.forwards[stage]):
            return ()
        if self.caps is not None and self.in_flight[stage] >= self.caps[stage]:
            return ()
        action = self.forwards[stage][index]
        return (action,) if self.done.issuperset(self.graph.inputs(action)) else ()

    def _finish(self, group: tuple[Action, ...]) -> None:
        stage = group[0].stage
        for action in group:
            self.done.update(self.graph.outputs(action))
        if group[0].kind is F:
            self.next_forward[stage] += 1
            self.in_flight[stage] += 1
            self.forwarded.add((stage, group[0].microbatch))
            for edge in self.graph.inputs(group[0]):
                if not self.graph.needs_backward(edge.source):
                    self._end_piece(edge.source, edge.microbatch)
            return
        self.next_backward[stage] += 1
        for action in group:
            self._end_piece(stage, action.microbatch)

    def _hold_until_consumed(self) -> None:
        """A microbatch of a stage without backward is in flight until the next stage has run it.

        Otherwise such a stage would run all its forwards first, and their outputs pile up.
        """
        for stage in range(self.placement.first_backward):
            last = stage == self.graph.num_encoder - 1
            for m in self.graph.microbatches(stage):
                self.pieces[stage, m] = len(self.graph.by_source[m]) if last else 1

    def _end_piece(self, stage: int, microbatch: int) -> None:
        self.pieces[stage, microbatch] -= 1
        self.in_flight[stage] -= not self.pieces[stage, microbatch]

    def _raise_stuck(self) -> None:
        stage = next(
            s
            for s in range(self.placement.num_stages)
            if self.next_backward[s] < len(self.backwards[s])
            or self.next_forward[s] < len(self.forwards[s])
        )
        raise ScheduleError(
            f"No action can follow on rank {self.placement.stage_to_rank[stage]} (stage {stage}, "
            f"{self.in_flight[stage]} microbatches in flight)",
            limit=f"in-flight caps {self.caps}",
            remedy="allow more microbatches in flight",
        )


def _backward_order(graph: StepGraph, stage: int, split_backward: bool) -> list[tuple[Action, ...]]:
    """B actions of a stage in the order their gradients arrive; each group is one unit of work."""
    if not (split_backward and graph.is_encoder(stage)):
        return [(Action(stage, B, m),) for m in graph.microbatches(stage)]
    groups = []
    for j in sorted(graph.by_target):
        whole = [len(graph.by_source[k]) == 1 for k in graph.by_target[j]]
        pairs = zip(graph.by_target[j], whole, strict=True)
        groups.append(tuple(Action(stage, B, k, None if one else j) for k, one in pairs))
    return groups
