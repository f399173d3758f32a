"""What each action consumes and produces: the one place that knows the data flow of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


@dataclass(frozen=True)
class Edge:
    """A tensor that one stage hands to a neighbour: a message, or a hand-off inside a rank.

    Attributes:
        forward: True for activations, False for gradients.
        source: Stage that makes it.
        dest: Stage that needs it.
        microbatch: Encoder microbatch up to the encoder-LLM boundary, LLM microbatch after it.
        target: LLM microbatch at the encoder-LLM boundary, and for gradients of one segment.
    """

    forward: bool
    source: int
    dest: int
    microbatch: int
    target: int | None = None

    def __hash__(self) -> int:
        target = -1 if self.target is None else self.target
        return hash((self.forward, self.source, self.dest, self.microbatch, target))

    @property
    def send(self) -> Action:
        """The action that posts the send."""
        kind = ActionKind.SEND_F if self.forward else ActionKind.SEND_B
        return Action(self.source, kind, self.microbatch, self.target)

    @property
    def receive(self) -> Action:
        """The action that posts the receive."""
        kind = ActionKind.RECV_F if self.forward else ActionKind.RECV_B
        return Action(self.dest, kind, self.microbatch, self.target)


class StepGraph:
    """Data flow of one replica's step, given its placement and rows."""

    def __init__(self, placement: Placement, rows: RowCounts) -> None:
        self.placement = placement
        self.rows = rows
        self.num_encoder = placement.num_encoder_stages
        self.last = placement.num_stages - 1
        self.first_backward = placement.first_backward
        self.by_source: dict[int, list[int]] = {}
        self.by_target: dict[int, list[int]] = {}
        for k, j in rows.segments:
            self.by_source.setdefault(k, []).append(j)
            self.by_target.setdefault(j, []).append(k)

    @cached_property
    def encoder_microbatches(self) -> tuple[int, ...]:
        """Encoder microbatches that are not empty."""
        return tuple(k for k, num_rows in enumerate(self.rows.encoder) if num_rows)

    @cached_property
    def llm_microbatches(self) -> tuple[int, ...]:
        """LLM microbatches that are not empty."""
        return tuple(j for j, num_rows in enumerate(self.rows.llm) if num_rows)

    def is_encoder(self, stage: int) -> bool:
        """True if the stage belongs to the encoder."""
        return stage < self.num_encoder

    def needs_backward(self, stage: int) -> bool:
        """Whether the stage computes gradients: it or a stage before it is trained."""
        return stage >= self.first_backward

    def microbatches(self, stage: int) -> tuple[int, ...]:
        """Microbatches that a stage computes, in order."""
        return self.encoder_microbatches if self.is_encoder(stage) else self.llm_microbatches

    def targets(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """Destinations of an encoder microbatch's segments; on LLM stages the microbatch itself."""
        if self.is_encoder(stage):
            return tuple(self.by_source.get(microbatch, ()))
        return (microbatch,)

    def inputs(self, action: Action) -> tuple[Edge, ...]:
        """Tensors a compute action needs from neighbouring stages."""
        if action.kind is F:
            return self._forward_inputs(action.stage, action.microbatch)
        if action.kind is B or action.kind is I:
            return self._backward_inputs(action.stage, action.microbatch, action.target)
        return ()

    def outputs(self, action: Action) -> tuple[Edge, ...]:
        """Tensors a compute action makes for neighbouring stages, in the order they are sent."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is F:
            if stage == self.last:
                return ()
            if stage == self.num_encoder - 1:
                targets = self.by_source.get(microbatch, ())
                return tuple(Edge(True, stage, stage + 1, microbatch, j) for j in targets)
            return (Edge(True, stage, stage + 1, microbatch),)
        if action.kind is B or action.kind is I:
            if stage <= self.first_backward:
                return ()
            if stage == self.num_encoder:
                sources = self.by_target.get(microbatch, ())
                return tuple(Edge(False, stage, stage - 1, k, microbatch) for k in sources)
            return (Edge(False, stage, stage - 1, microbatch, action.target),)
        return ()

    def _forward_inputs(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        if stage == 0:
            return ()
        if stage == self.num_encoder:
            sources = self.by_target.get(microbatch, ())
            return tuple(Edge(True, stage - 1, stage, k, microbatch) for k in sources)
        return (Edge(True, stage - 1, stage, microbatch),)

    def _backward_inputs(self, stage: int, microbatch: int, target: int | None) -> tuple[Edge, ...]:
        if stage == self.last:
            return ()
        if stage == self.num_encoder - 1:
            targets = self.by_source.get(microbatch, ()) if target is None else (target,)
            return tuple(Edge(False, stage + 1, stage, microbatch, j) for j in targets)
        return (Edge(False, stage + 1, stage, microbatch, target),)

    def is_local(self, edge: Edge) -> bool:
        """True if both stages lie on one rank: a hand-off, not a message."""
        place = self.placement.stage_to_rank
        return place[edge.source] == place[edge.dest]

    def num_rows(self, edge: Edge) -> int:
        """Rows of the tensor that an edge carries."""
        if max(edge.source, edge.dest) == self.num_encoder:
            if edge.target is None:
                raise ScheduleError(f"A tensor from stage {edge.source} names no LLM microbatch")
            return self.rows.segments.get((edge.microbatch, edge.target), 0)
        if edge.source >= self.num_encoder:
            return self.rows.llm[edge.microbatch]
        if edge.target is None:
            return self.rows.encoder[edge.microbatch]
        return self.rows.patches_of((edge.microbatch, edge.target))


def event_order(
    graph: StepGraph, ranks: Sequence[Sequence[Action]]
) -> list[tuple[int, int, Action]]:
    """All compute actions in one global order, as if each took one unit of time.

    Args:
        graph: Data flow.
        ranks: Compute actions per rank.

    Returns:
        (end time, rank, action), by end time, then rank.

    Raises:
        ScheduleError: If the lists wait for each other.
    """
    finished: dict[Edge, int] = {}
    waiting: dict[Edge, int] = {}
    position = [0] * len(ranks)
    free_at = [0] * len(ranks)
    events: list[tuple[int, int, Action]] = []
    active = list(range(len(ranks)))
    while active:
        rank = active.pop()
        own = ranks[rank]
        while position[rank] < len(own):
            action = own[position[rank]]
            start = free_at[rank]
            for edge in graph.inputs(action):
                if edge not in finished:
                    waiting[edge] = rank
                    break
                start = max(start, finished[edge])
            else:
                free_at[rank] = start + 1
                position[rank] += 1
                events.append((start + 1, rank, action))
                for edge in graph.outputs(action):
                    finished[edge] = start + 1
                    if edge in waiting:
                        active.append(waiting.pop(edge))
                continue
            break
    for rank, own in enumerate(ranks):
        if position[rank] < len(own):
            action = own[position[rank]]
            missing = next(e for e in graph.inputs(action) if e not in finished)
            raise ScheduleError(
                f"Rank {rank} cannot run action {position[rank]}, {action}: "
                f"it waits for ever for what stage {missing.source} should make",
                limit="every action's inputs are made before it in some common order",
            )
    events.sort(key=lambda event: event[:2])
    return events
