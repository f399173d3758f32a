"""Lowering: sends and receives are added to all ranks' lists from one global event order.

Every rank's list is then a part of one common sequence in which each transfer follows the action
that makes its tensor. So the step progresses even where every rank works through its transfers
in a single stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import Edge, StepGraph, event_order
from lightning_entrain.schedule.types import Action, ActionKind, RowCounts, Schedule


@dataclass(frozen=True, kw_only=True)
class Message:
    """One transfer between two ranks, known in full before the step runs.

    Attributes:
        kind: SEND_F for activations, SEND_B for gradients.
        source_stage: Stage that makes the tensor.
        target_stage: Stage that needs it.
        microbatch: Encoder microbatch up to the encoder-LLM boundary, LLM microbatch after it.
        target: LLM microbatch of the segment, where the message is one.
        rows: Rows of the tensor.
        columns: Columns of the tensor.
        dtype: Name of its dtype, such as "float32".
        source_rank: Sending rank inside the replica.
        target_rank: Receiving rank inside the replica.
        tag: Unique in the step among the messages between the two ranks.
    """

    kind: ActionKind
    source_stage: int
    target_stage: int
    microbatch: int
    target: int | None
    rows: int
    columns: int
    dtype: str
    source_rank: int
    target_rank: int
    tag: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """A lowered schedule and its messages.

    Attributes:
        schedule: Lists with transfers. A receive's place is where it is posted; the compute
            action that needs the tensor waits for it. Sends are asynchronous.
        messages: The message of each transfer; both partners' actions map to the same one.
        boundary_columns: Columns of the tensor between stage s and s+1.
        dtype: Name of the dtype of all messages.
    """

    schedule: Schedule
    messages: Mapping[Action, Message]
    boundary_columns: tuple[int, ...]
    dtype: str


def lower(
    schedule: Schedule,
    rows: RowCounts,
    *,
    boundary_columns: Sequence[int],
    dtype: str,
) -> Program:
    """Add the transfers to a schedule of compute actions.

    Args:
        schedule: Compute actions per rank.
        rows: Rows per microbatch and segment.
        boundary_columns: Columns of the tensor between stage s and s+1, one per boundary.
        dtype: Name of the dtype of all tensors sent.

    Returns:
        The lowered program. Hand-offs inside a rank and tensors without rows have no transfer.

    Raises:
        ScheduleError: If the lists wait for each other or already hold transfers.
    """
    placement = schedule.placement
    if len(boundary_columns) != placement.num_stages - 1 or min(boundary_columns) < 1:
        raise ScheduleError(
            f"boundary_columns {list(boundary_columns)}",
            limit=f"one positive number per boundary between {placement.num_stages} stages",
        )
    if any(not a.kind.is_compute for own in schedule.ranks for a in own):
        raise ScheduleError("The schedule already holds transfers", remedy="lower it once only")
    graph = StepGraph(placement, rows)
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    messages: dict[Action, Message] = {}
    num_tags: dict[tuple[int, int], int] = {}
    for _, rank, action in event_order(graph, schedule.ranks):
        lists[rank].append(action)
        for edge in graph.outputs(action):
            if graph.is_local(edge) or not graph.num_rows(edge):
                continue
            message = _message(graph, edge, boundary_columns, dtype, num_tags)
            lists[message.source_rank].append(edge.send)
            lists[message.target_rank].append(edge.receive)
            messages[edge.send] = messages[edge.receive] = message
    lowered = Schedule(
        name=schedule.name,
        placement=placement,
        ranks=tuple(map(tuple, lists)),
        forward_only=schedule.forward_only,
    )
    return Program(
        schedule=lowered,
        messages=messages,
        boundary_columns=tuple(boundary_columns),
        dtype=dtype,
    )


def _message(
    graph: StepGraph,
    edge: Edge,
    boundary_columns: Sequence[int],
    dtype: str,
    num_tags: dict[tuple[int, int], int],
) -> Message:
    place = graph.placement.stage_to_rank
    source_rank, target_rank = place[edge.source], place[edge.dest]
    pair = min(source_rank, target_rank), max(source_rank, target_rank)
    tag = num_tags.get(pair, 0)
    num_tags[pair] = tag + 1
    return Message(
        kind=ActionKind.SEND_F if edge.forward else ActionKind.SEND_B,
        source_stage=edge.source,
        target_stage=edge.dest,
        microbatch=edge.microbatch,
        target=edge.target,
        rows=graph.num_rows(edge),
        columns=boundary_columns[min(edge.source, edge.dest)],
        dtype=dtype,
        source_rank=source_rank,
        target_rank=target_rank,
        tag=tag,
    )
