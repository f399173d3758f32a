"""Between records and kernels: costs as integer tables, kernel codes as actions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.simulate import Link, StepCosts, segment_shares
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts

Ints = NDArray[np.int64]
MaxBytes = float | Sequence[float] | None
"""Most activation bytes a rank may hold: one number for all, one per rank, or no cap."""

MEMORY_UNITS = 1 << 40
TIME_UNITS = 1 << 20


def actions_of(graph: StepGraph, stage: int, position: int, kind: int) -> list[Action]:
    """Actions of one code of the kernels: F, I or W (0, 1, 2) of one position; none if empty.

    Stages without backward have codes for I and W, which take no time, but no such actions.

    On encoder stages I and W of position j cover the segments that end in LLM microbatch j.
    """
    name = (ActionKind.F, ActionKind.I, ActionKind.W)[kind]
    if kind and not graph.needs_backward(stage):
        return []
    if kind == 0 or not graph.is_encoder(stage):
        counts = graph.rows.encoder if graph.is_encoder(stage) else graph.rows.llm
        return [Action(stage, name, position)] if counts[position] else []
    actions = []
    for k in graph.by_target.get(position, ()):
        whole = len(graph.by_source[k]) == 1
        actions.append(Action(stage, name, k, None if whole else position))
    return actions


def memory_caps(max_bytes: MaxBytes, num_ranks: int, num_microbatches: int) -> Ints:
    """The caps in the kernels' unit; a little more for sizes that were rounded up."""
    if max_bytes is None:
        return np.full(num_ranks, 1 << 59, dtype=np.int64)
    each = per_rank(max_bytes, num_ranks)
    slack = 4 * num_microbatches
    return np.array([int(x / max(each) * MEMORY_UNITS) + slack for x in each], dtype=np.int64)


def per_rank(max_bytes: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    """One cap for each rank.

    Raises:
        ScheduleError: If a cap is not positive, or there are not as many as ranks.
    """
    each = tuple(max_bytes) if isinstance(max_bytes, Sequence) else (max_bytes,) * num_ranks
    if len(each) != num_ranks or not all(x > 0 for x in each):
        raise ScheduleError(
            f"max_bytes is {max_bytes}", limit=f"more than 0, one or {num_ranks} numbers"
        )
    return each


def cost_tables(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: MaxBytes,
    link: Link | None,
) -> Ints:
    """Costs as integers in the kernels' layout, ``[7, stages, microbatches]``."""
    num_stages, num = placement.num_stages, rows.num_microbatches
    if costs.forward_ms.shape != (num_stages, num):
        raise ScheduleError(
            f"Costs of shape {costs.forward_ms.shape}", limit=f"{(num_stages, num)}"
        )
    graph = StepGraph(placement, rows)
    times = np.zeros((7, num_stages, num))
    for s in range(num_stages):
        exists = np.array(rows.encoder if graph.is_encoder(s) else rows.llm) > 0
        times[0, s] = (costs.forward_ms[s] + costs.overhead_ms) * exists
        times[5, s] = costs.activation_bytes[s] * exists
        if not graph.is_encoder(s):
            times[1, s] = (costs.input_ms[s] + costs.overhead_ms) * exists
            times[2, s] = (costs.weight_ms[s] + costs.overhead_ms) * exists
            times[6, s] = times[5, s]
    encoder = slice(0, placement.num_encoder_stages)
    for (k, j), share in segment_shares(rows, costs).items():
        times[1, encoder, j] += costs.input_ms[encoder, k] * share + costs.overhead_ms
        times[2, encoder, j] += costs.weight_ms[encoder, k] * share + costs.overhead_ms
        times[6, encoder, j] += costs.activation_bytes[encoder, k] * share
    if link is not None:
        _add_transfers(times, placement, rows, link)
    forward_only = slice(0, placement.first_backward)
    times[1:3, forward_only] = times[5:, forward_only] = 0.0
    times[4, : placement.first_backward + 1] = 0.0
    # fsum: numpy's order of summation depends on the machine, and all ranks must agree.
    mean = math.fsum(costs.forward_ms.ravel().tolist()) / max(costs.forward_ms.size, 1)
    tables = np.zeros(times.shape, dtype=np.int64)
    tables[:5] = np.round(times[:5] * (TIME_UNITS / (mean or 1.0)))
    largest = float(times[5].max()) if times.size else 0.0
    # Without a cap the sizes do not matter; they only have to stay small.
    scale = (largest or 1.0) * 1024
    if max_bytes is not None:
        scale = max(per_rank(max_bytes, placement.num_ranks))
    unit = MEMORY_UNITS / scale
    # Whatever is far too large stays so without overflow.
    tables[5] = np.minimum(np.ceil(times[5] * unit), 1 << 50)
    tables[6] = np.minimum(np.floor(times[6] * unit), 1 << 50)
    return tables


def _add_transfers(
    times: NDArray[np.float64], placement: Placement, rows: RowCounts, link: Link
) -> None:
    boundary = placement.num_encoder_stages - 1
    for s in range(placement.num_stages - 1):
        if placement.stage_to_rank[s] == placement.stage_to_rank[s + 1]:
            continue
        for m in range(rows.num_microbatches):
            counts = rows.encoder if s < boundary else rows.llm
            if s != boundary:
                times[3, s, m] = times[4, s + 1, m] = link.transfer_ms(counts[m], s)
        if s == boundary:
            for (_, j), num_rows in rows.segments.items():
                times[3, s, j] += link.transfer_ms(num_rows, s)
                times[4, s + 1, j] += link.transfer_ms(num_rows, s)


def unit_costs(placement: Placement, rows: RowCounts) -> StepCosts:
    """One unit of time for every F, I and W."""
    ones = np.ones((placement.num_stages, rows.num_microbatches))
    return StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)
