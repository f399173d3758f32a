"""Zero bubble: B split into I and W, with W in the gaps (Qi et al., ICLR 2024), deferral-aware.

The static order is ZB-H1's: on stage s of S, S-s warm-up forwards, then I, W delayed by s, F.
Warm-up and delay of each stage and the order of the microbatches are then tuned by hill climbing on
predicted times, under a memory cap per rank. With deferral the encoder back-propagates segment by
segment: what LLM microbatch j needs of encoder microbatches j-1 and j is ready when the LLM's I of
j has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.simulate import Link, StepCosts
from lightning_entrain.schedule.tables import (
    MaxBytes,
    actions_of,
    cost_tables,
    memory_caps,
    unit_costs,
)
from lightning_entrain.schedule.types import Action, Placement, RowCounts, Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What shapes a zero-bubble order.

    Attributes:
        warmup: Per rank (per stage for list schedules) the microbatches with F begun and I not
            ended that it aims at.
        weight_delay: Likewise the W left pending after each I.
    """

    warmup: tuple[int, ...]
    weight_delay: tuple[int, ...]

    @classmethod
    def zb_h1(cls, num_stages: int) -> Knobs:
        """The memory of 1F1B where all microbatches are equal."""
        return cls(
            warmup=tuple(num_stages - s for s in range(num_stages)),
            weight_delay=tuple(range(num_stages)),
        )


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A schedule with the order of microbatches it was tuned for.

    Attributes:
        schedule: Its microbatches are positions in ``order``.
        order: Per position the microbatch of the costs and rows given.
        knobs: What was found, if it was made from knobs.
    """

    schedule: Schedule
    order: tuple[int, ...]
    knobs: Knobs | None = None

    def reorder_assignment(self, replica: ReplicaAssignment) -> ReplicaAssignment:
        """The replica's microbatches in this order."""
        return replace(
            replica,
            encoder=tuple(replica.encoder[m] for m in self.order),
            llm=tuple(replica.llm[m] for m in self.order),
        )

    def reorder_rows(self, rows: RowCounts) -> RowCounts:
        """The rows in this order."""
        at = {m: p for p, m in enumerate(self.order)}
        return RowCounts(
            encoder=tuple(rows.encoder[m] for m in self.order),
            llm=tuple(rows.llm[m] for m in self.order),
            segments={(at[k], at[j]): n for (k, j), n in rows.segments.items()},
            segment_patches={(at[k], at[j]): n for (k, j), n in rows.segment_patches.items()},
        )

    def reorder_costs(self, costs: StepCosts) -> StepCosts:
        """The costs in this order."""
        at = {m: p for p, m in enumerate(self.order)}
        order = list(self.order)
        return replace(
            costs,
            forward_ms=costs.forward_ms[:, order],
            input_ms=costs.input_ms[:, order],
            weight_ms=costs.weight_ms[:, order],
            activation_bytes=costs.activation_bytes[:, order],
            segment_shares={(at[k], at[j]): x for (k, j), x in costs.segment_shares.items()},
        )


def build_zero_bubble(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts | None = None,
    *,
    max_bytes: MaxBytes = None,
    knobs: Knobs | None = None,
    link: Link | None = None,
) -> Schedule:
    """One zero-bubble order; ZB-H1 by default.

    Args:
        placement: The stages of a rank follow each other (one stage, or a shared boundary).
        rows: Rows per microbatch and segment.
        costs: Predicted times, by which W moves into gaps; default one unit per action.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold: one number for
            all, one per rank, or None for no cap.
        knobs: Warm-up and W delay per stage.
        link: Transfer times; None for none.

    Raises:
        ScheduleError: If a rank's stages are not neighbours, or the memory does not suffice.
    """
    unit = costs or unit_costs(placement, rows)
    return tune_zero_bubble(
        placement, rows, unit, max_bytes=max_bytes, knobs=knobs, link=link, num_steps=0
    ).schedule


def tune_zero_bubble(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: MaxBytes = None,
    knobs: Knobs | None = None,
    link: Link | None = None,
    num_steps: int = 1000,
    may_reorder: bool = True,
    seed: int = 0,
) -> Tuned:
    """Tune warm-up, W delay and (without deferral) the order of the microbatches.

    Args:
        placement: The stages of a rank follow each other (one stage, or a shared boundary).
        rows: Rows per microbatch and segment.
        costs: Predicted times and bytes.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold: one number for
            all, one per rank, or None for no cap.
        knobs: Where the search starts; default ZB-H1.
        link: Transfer times; None for none.
        num_steps: Orders to try; one takes about 10 us for 8 stages and 32 microbatches.
        may_reorder: Whether microbatches may change places. Ignored where samples are deferred.
        seed: Of the search. Equal arguments give an equal result on every machine.

    Raises:
        ScheduleError: If a rank's stages are not neighbours, or the memory does not suffice.
    """
    from lightning_entrain.schedule import zb_kernel

    num_ranks, num = placement.num_ranks, rows.num_microbatches
    if tuple(sorted(placement.stage_to_rank)) != placement.stage_to_rank:
        raise ScheduleError(
            f"stage_to_rank is {list(placement.stage_to_rank)}",
            limit="a static zero-bubble order needs ascending ranks",
            remedy="use tune_list_schedule",
        )
    tables = _merge(cost_tables(placement, rows, costs, max_bytes=max_bytes, link=link), placement)
    order = np.arange(num, dtype=np.int64)
    caps = memory_caps(max_bytes, num_ranks, num)
    start = knobs or Knobs.zb_h1(num_ranks)
    if {len(start.warmup), len(start.weight_delay)} != {num_ranks} or min(start.warmup) < 1:
        raise ScheduleError(
            f"Knobs {start}", limit=f"one warm-up, at least 1, and one delay per rank ({num_ranks})"
        )
    warmup, delay = _start(order, tables, caps, start)
    codes = np.zeros((num_ranks, 3 * num), dtype=np.int64)
    done = np.full((num_ranks, 3 * num), -1, dtype=np.int64)
    if num:
        free_order = may_reorder and rows.max_lag == 0
        zb_kernel.climb(order, tables, caps, warmup, delay, num_steps, free_order, seed + 1)
        makespan = zb_kernel.evaluate(
            order, tables, caps, warmup, delay, codes, done, zb_kernel.STUCK
        )
        if makespan == zb_kernel.STUCK:
            raise ScheduleError(
                f"No zero-bubble order fits into max_bytes {max_bytes}",
                limit="at least the activations of the largest microbatch on each rank",
                remedy="raise the memory budget or use more, smaller microbatches",
            )
    tuned = Tuned(
        schedule=Schedule(name="zero_bubble", placement=placement, ranks=()),
        order=tuple(order.tolist()),
        knobs=Knobs(warmup=tuple(warmup.tolist()), weight_delay=tuple(delay.tolist())),
    )
    graph = StepGraph(placement, tuned.reorder_rows(rows))
    ranks = tuple(_expand(graph, rank, done[rank].tolist()) for rank in range(num_ranks))
    return replace(tuned, schedule=replace(tuned.schedule, ranks=ranks))


def _merge(tables: Ints, placement: Placement) -> Ints:
    """Neighbouring stages on one rank as one stage: its actions follow each other."""
    merged = np.zeros((7, placement.num_ranks, tables.shape[2]), dtype=np.int64)
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        merged[:, rank] = tables[:, own].sum(axis=1)
        merged[3, rank] = tables[3, own[-1]]
        merged[4, rank] = tables[4, own[0]]
    return merged


def _expand(graph: StepGraph, rank: int, codes: list[int]) -> tuple[Action, ...]:
    """Actions of a rank's codes: F up its stages, I and W down them."""
    up = graph.placement.stages_of(rank)
    return tuple(
        action
        for code in codes
        if code >= 0
        for stage in (up if code % 3 == 0 else up[::-1])
        for action in actions_of(graph, stage, code // 3, code % 3)
    )


def _start(order: Ints, tables: Ints, caps: Ints, knobs: Knobs) -> tuple[Ints, Ints]:
    """The knobs, or the best of those with less warm-up where unequal memory stops them."""
    from lightning_entrain.schedule import zb_kernel

    codes = np.zeros((tables.shape[1], 3 * tables.shape[2]), dtype=np.int64)
    done = np.zeros_like(codes)
    best, found = zb_kernel.STUCK, (np.array(knobs.warmup), np.array(knobs.weight_delay))
    if not len(order):
        return found
    # Ranks without backward need not wait for any: all their F may go first.
    free = ~tables[1:3].any(axis=(0, 2)) & ~tables[zb_kernel.ADD].any(axis=1)
    for limit in range(max(knobs.warmup), 0, -1):
        warmup = np.minimum(knobs.warmup, limit).astype(np.int64)
        warmup[free] = len(order)
        delay = np.minimum(knobs.weight_delay, limit - 1).astype(np.int64)
        if limit == max(knobs.warmup):
            delay = np.array(knobs.weight_delay, dtype=np.int64)
        makespan = zb_kernel.evaluate(order, tables, caps, warmup, delay, codes, done, best)
        if makespan < best:
            best, found = makespan, (warmup, delay)
    return found
