"""Verification: every rule a program must obey, checked before anything runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from itertools import zip_longest
from typing import NoReturn

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.lower import Message, Program
from lightning_entrain.schedule.types import Action, ActionKind, RowCounts, Schedule

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741

STREAMS: dict[str, Callable[[Message, int], Hashable]] = {
    "one stream per rank": lambda message, rank: rank,
    "one stream per pair of ranks": lambda message, rank: (
        rank,
        message.source_rank + message.target_rank,
        abs(message.source_rank - message.target_rank),
    ),
    "one stream per direction and peer": lambda message, rank: (
        rank,
        message.source_rank,
        message.target_rank,
    ),
    "tag-matched transfers": lambda message, rank: (rank, message),
}
"""Which of a rank's transfers queue behind each other, strictest first."""


def verify(program: Program, rows: RowCounts, *, max_live: int | None = None) -> None:
    """Check a lowered program.

    Rules: each action lies on the rank that holds its stage; every action exactly once, none
    missing; F before B, and F before I before W; every message has its partner with equal shape
    and dtype; equal order on both sides of each channel and tags unique on it; a tensor is made
    before it is sent and received before it is used; the step progresses even if each rank has a
    single communication stream in which a transfer waits for its partner.

    Args:
        program: What :func:`~lightning_entrain.schedule.lower.lower` returned.
        rows: Rows per microbatch and segment.
        max_live: Largest number of (stage, microbatch) pairs per rank with F begun and B (or W)
            not ended; unchecked if None.

    Raises:
        ScheduleError: Naming the rank, the position in its list and the action.
    """
    _Verifier(program, rows).run(max_live)


def peak_live(schedule: Schedule, rows: RowCounts) -> tuple[int, ...]:
    """Largest number of live (stage, microbatch) pairs per rank, from the order of its list.

    Live: F begun and the last B (or W) not ended. Stages without backward hold one at a time.
    """
    graph = StepGraph(schedule.placement, rows)
    return tuple(_peak(graph, own, schedule.forward_only)[0] for own in schedule.ranks)


def _peak(
    graph: StepGraph, own: tuple[Action, ...], forward_only: bool, limit: int | None = None
) -> tuple[int, int]:
    """Peak of one rank, and the position where it first goes beyond the limit (or -1)."""
    live = peak = 0
    left: dict[tuple[int, int], int] = {}
    split = {(a.stage, a.microbatch) for a in own if a.kind is W}
    for position, action in enumerate(own):
        key = action.stage, action.microbatch
        if action.kind is F:
            live += 1
            peak = max(peak, live)
            if limit is not None and live > limit:
                return peak, position
            left[key] = len(graph.targets(*key))
            live -= forward_only or not graph.needs_backward(action.stage)
        elif action.kind is W or (action.kind is B and key not in split):
            left[key] -= left[key] if action.target is None else 1
            live -= not left[key]
    return peak, -1


class _Verifier:
    def __init__(self, program: Program, rows: RowCounts) -> None:
        self.program = program
        self.schedule = program.schedule
        self.ranks = program.schedule.ranks
        self.placement = program.schedule.placement
        self.graph = StepGraph(self.placement, rows)
        self.where: dict[Action, tuple[int, int]] = {}

    def run(self, max_live: int | None) -> None:
        self._check_places()
        self._check_compute()
        self._check_messages()
        self._check_channels()
        self._check_use()
        self._check_progress()
        if max_live is not None:
            self._check_live(max_live)

    def _fail(self, rank: int, position: int, problem: str, limit: str) -> NoReturn:
        own = self.ranks[rank] if rank < len(self.ranks) else ()
        name = str(own[position]) if position < len(own) else "end of the list"
        raise ScheduleError(
            f"Schedule {self.schedule.name}, rank {rank}, position {position}, {name}: {problem}",
            limit=limit,
        )

    def _check_places(self) -> None:
        if len(self.ranks) != self.placement.num_ranks:
            raise ScheduleError(
                f"Schedule {self.schedule.name} has {len(self.ranks)} lists",
                limit=f"one per rank, {self.placement.num_ranks}",
            )
        for rank, own in enumerate(self.ranks):
            stages = self.placement.stages_of(rank)
            for position, action in enumerate(own):
                if action.stage not in stages:
                    self._fail(rank, position, f"the rank holds stages {stages}", "own stages only")
                if action in self.where:
                    self._fail(rank, position, "it appears twice", "every action exactly once")
                self.where[action] = rank, position

    def _check_compute(self) -> None:
        """Every compute action exactly once, none missing, F before I before W."""
        expected = {
            (s, m): set(self.graph.targets(s, m))
            for s in range(self.placement.num_stages)
            for m in self.graph.microbatches(s)
        }
        done: dict[ActionKind, dict[tuple[int, int], set[int]]] = {F: {}, I: {}, W: {}}
        for rank, own in enumerate(self.ranks):
            for position, action in enumerate(own):
                if action.kind.is_compute:
                    self._compute_one(rank, position, action, expected, done)
        wanted = [F] if self.schedule.forward_only else [F, I, W]
        for kind in wanted:
            for (stage, microbatch), targets in expected.items():
                if kind is not F and not self.graph.needs_backward(stage):
                    continue
                if done[kind].get((stage, microbatch), set()) != targets:
                    rank = self.placement.stage_to_rank[stage]
                    name = {F: "F", I: "B or I", W: "B or W"}[kind]
                    self._fail(
                        rank,
                        len(self.ranks[rank]),
                        f"{name} of microbatch {microbatch} on stage {stage} is missing",
                        "every action exactly once",
                    )

    def _compute_one(
        self,
        rank: int,
        position: int,
        action: Action,
        expected: dict[tuple[int, int], set[int]],
        done: dict[ActionKind, dict[tuple[int, int], set[int]]],
    ) -> None:
        key, kind = (action.stage, action.microbatch), action.kind
        if key not in expected:
            self._fail(rank, position, "the microbatch is empty", "no action without rows")
        if kind is not F and self.schedule.forward_only:
            self._fail(rank, position, "a gradient in a forward pass", "F actions only")
        if kind is not F and not self.graph.needs_backward(action.stage):
            self._fail(
                rank,
                position,
                "nothing is trained up to this stage",
                f"backward from stage {self.graph.first_backward} on",
            )
        targets = expected[key]
        if action.target is not None:
            if kind is F or action.target not in targets or not self.graph.is_encoder(action.stage):
                self._fail(rank, position, "no such segment", "segments of the assignment")
            targets = {action.target}
        if kind is not F and key not in done[F]:
            self._fail(rank, position, "its F comes later or never", "F before B, I and W")
        if kind is W and not targets <= done[I].get(key, set()):
            self._fail(rank, position, "its I comes later or never", "I before W")
        for part in (I, W) if kind is B else (kind,):
            covered = done[part].setdefault(key, set())
            if covered & targets:
                self._fail(rank, position, "its work is done twice", "every action exactly once")
            covered |= targets

    def _edges(self) -> dict[Action, Edge]:
        """Transfers that the compute actions call for, by action."""
        edges: dict[Action, Edge] = {}
        for own in self.ranks:
            for action in own:
                if not action.kind.is_compute:
                    continue
                for edge in self.graph.outputs(action):
                    if not self.graph.is_local(edge) and self.graph.num_rows(edge):
                        edges[edge.send] = edges[edge.receive] = edge
        return edges

    def _check_messages(self) -> None:
        """Each transfer is called for, has its partner, and both agree on every detail."""
        edges = self._edges()
        for action in edges:
            if action not in self.where:
                rank = self.placement.stage_to_rank[action.stage]
                self._fail(
                    rank,
                    len(self.ranks[rank]),
                    f"{action} is missing",
                    "each message has a send and a receive",
                )
        for rank, own in enumerate(self.ranks):
            for position, action in enumerate(own):
                if action.kind.is_compute:
                    continue
                edge = edges.get(action)
                if edge is None:
                    self._fail(rank, position, "nothing to transfer", "messages with rows only")
                self._check_message(rank, position, action, edge)

    def _check_message(self, rank: int, position: int, action: Action, edge: Edge) -> None:
        message = self.program.messages.get(action)
        if message is None:
            self._fail(rank, position, "it has no message", "each transfer has a message")
        place = self.placement.stage_to_rank
        partner = edge.receive if action.kind.is_send else edge.send
        columns = self.program.boundary_columns[min(edge.source, edge.dest)]
        kind = ActionKind.SEND_F if edge.forward else ActionKind.SEND_B
        found = message.rows, message.columns, message.dtype
        wanted = self.graph.num_rows(edge), columns, self.program.dtype
        if found != wanted:
            self._fail(
                rank,
                position,
                f"its message is {found[0]} x {found[1]} {found[2]}",
                f"{wanted[0]} x {wanted[1]} {wanted[2]}",
            )
        ends = message.source_stage, message.target_stage, message.source_rank, message.target_rank
        if ends != (edge.source, edge.dest, place[edge.source], place[edge.dest]):
            self._fail(
                rank,
                position,
                "its message goes from stage {}, to {}, from rank {} to {}".format(*ends),
                f"from stage {edge.source} to {edge.dest}, as placed",
            )
        if (message.kind, message.microbatch, message.target) != (
            kind,
            edge.microbatch,
            edge.target,
        ):
            self._fail(rank, position, "its message is another's", f"{edge.send}")
        if self.program.messages.get(partner) != message:
            self._fail(
                rank,
                position,
                f"its partner {partner} has another message",
                "both partners share one message",
            )

    def _check_channels(self) -> None:
        """Equal order on both sides of each channel; no tag twice on it."""
        sides: tuple[dict[tuple[int, int], list[tuple[int, int, Message]]], ...] = ({}, {})
        tags: set[tuple[int, int, int]] = set()
        for rank, own in enumerate(self.ranks):
            for position, action in enumerate(own):
                if action.kind.is_compute:
                    continue
                message = self.program.messages[action]
                channel = message.source_rank, message.target_rank
                side = sides[0 if action.kind.is_send else 1]
                side.setdefault(channel, []).append((rank, position, message))
                if action.kind.is_send:
                    key = min(channel), max(channel), message.tag
                    if key in tags:
                        self._fail(
                            rank, position, f"tag {message.tag} is taken", "one tag per message"
                        )
                    tags.add(key)
        for channel, sent in sides[0].items():
            received = sides[1].get(channel, [])
            for send, receive in zip_longest(sent, received):
                # Counts are equal: each message was found on both sides.
                if send[2] != receive[2]:
                    self._fail(
                        receive[0],
                        receive[1],
                        f"rank {send[0]} sends message {send[2].tag} at this place of the channel, "
                        f"not {receive[2].tag}",
                        "equal order on both sides of a channel",
                    )

    def _check_use(self) -> None:
        """A tensor is made before it is sent or handed over, and received before it is used."""
        made: dict[Edge, tuple[int, int]] = {}
        for rank, own in enumerate(self.ranks):
            for position, action in enumerate(own):
                for edge in self.graph.outputs(action):
                    made[edge] = rank, position
                    if edge.send in self.where and self.where[edge.send][1] < position:
                        self._fail(
                            rank,
                            self.where[edge.send][1],
                            f"its tensor is made later, by {action}",
                            "send after the action that makes the tensor",
                        )
        for rank, own in enumerate(self.ranks):
            for position, action in enumerate(own):
                for edge in self.graph.inputs(action):
                    if edge not in made:
                        self._fail(
                            rank,
                            position,
                            f"stage {edge.source} never makes its input",
                            "whole microbatches or segments alike on all stages of a module",
                        )
                    if self.graph.is_local(edge):
                        late = made[edge][1] > position
                    else:
                        late = self.where[edge.receive][1] > position
                    if late:
                        self._fail(
                            rank, position, "its input comes later", "receive (or make) before use"
                        )

    def _check_progress(self) -> None:
        """A stricter stream order implies the looser ones, so those only explain a failure."""
        names = list(STREAMS)
        blocked = self._blocked(STREAMS[names[0]])
        if blocked is None:
            return
        failing = [n for n in names if n == names[0] or self._blocked(STREAMS[n]) is not None]
        self._fail(
            *blocked, f"dead-lock with {', '.join(failing)}", "progress under every stream order"
        )

    def _blocked(self, stream_of: Callable[[Message, int], Hashable]) -> tuple[int, int] | None:
        """Run the lists with rendezvous transfers; where the first rank stands if all stop."""
        run = _Progress(self, stream_of)
        run.advance()
        for rank, own in enumerate(self.ranks):
            if run.position[rank] < len(own):
                return rank, run.position[rank]
        if run.num_pending:
            # All lists ended, but transfers never met: name the first that still waits.
            action = next(queue[0] for queue in run.streams.values() if queue)
            return self.where[action]
        return None

    def _check_live(self, max_live: int) -> None:
        for rank, own in enumerate(self.ranks):
            peak, position = _peak(self.graph, own, self.schedule.forward_only, max_live)
            if position >= 0:
                self._fail(rank, position, f"{peak} microbatches are live", f"max_live {max_live}")


class _Progress:
    """Which actions can run if each transfer waits for its partner in its stream."""

    def __init__(self, verifier: _Verifier, stream_of: Callable[[Message, int], Hashable]) -> None:
        self.verifier = verifier
        self.graph = verifier.graph
        self.messages = verifier.program.messages
        self.ranks = verifier.ranks
        self.stream_of = stream_of
        self.position = [0] * len(self.ranks)
        self.streams: dict[Hashable, deque[Action]] = {}
        self.heads: dict[Message, Hashable] = {}
        self.received: set[Action] = set()
        self.num_pending = 0

    def advance(self) -> None:
        active = list(range(len(self.ranks)))
        while active:
            active.extend(self._run_rank(active.pop()))

    def _run_rank(self, rank: int) -> list[int]:
        """Run a rank until it waits; the ranks whose receives completed meanwhile."""
        own = self.ranks[rank]
        woken: list[int] = []
        while self.position[rank] < len(own):
            action = own[self.position[rank]]
            if action.kind.is_compute:
                inputs = self.graph.inputs(action)
                if any(
                    e.receive not in self.received for e in inputs if not self.graph.is_local(e)
                ):
                    break
            else:
                stream = self.stream_of(self.messages[action], rank)
                queue = self.streams.setdefault(stream, deque())
                queue.append(action)
                self.num_pending += 1
                if len(queue) == 1:
                    self._meet(stream, woken)
            self.position[rank] += 1
        return woken

    def _meet(self, stream: Hashable, woken: list[int]) -> None:
        """A transfer reached the head of its stream: complete it if its partner is at one too."""
        pending = [stream]
        while pending:
            own = pending.pop()
            queue = self.streams[own]
            if not queue:
                continue
            message = self.messages[queue[0]]
            other = self.heads.get(message)
            if other is None or other == own:
                self.heads[message] = own
                continue
            del self.heads[message]
            for end in (own, other):
                done = self.streams[end].popleft()
                self.num_pending -= 1
                if not done.kind.is_send:
                    self.received.add(done)
            woken.append(message.target_rank)
            pending += [own, other]
