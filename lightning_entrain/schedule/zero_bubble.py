"""Zero bubble: B split into I and W, with W in the gaps (Qi et al., ICLR 2024), deferral-aware.

The static order is ZB-H1's: on stage s of S, S-s warm-up forwards, then I, W delayed by s, F.
Warm-up and delay of each stage and the order of the microbatches are then tuned by hill climbing on
predicted times, under a memory cap per rank. With deferral the encoder back-propagates segment by
segment: what LLM microbatch j needs of encoder microbatches j-1 and j is ready when the LLM's I of
j has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.simulate import Link, StepCosts, segment_shares
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts, Schedule

Ints = NDArray[np.int64]
_MEMORY_UNITS = 1 << 40
_TIME_UNITS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What shapes a zero-bubble order.

    Attributes:
        warmup: Per stage the microbatches with F begun and I not ended that it aims at.
        weight_delay: Per stage the W left pending after each I.
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
        knobs: What was found.
    """

    schedule: Schedule
    order: tuple[int, ...]
    knobs: Knobs

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
    max_bytes: float | None = None,
    knobs: Knobs | None = None,
    link: Link | None = None,
) -> Schedule:
    """One zero-bubble order; ZB-H1 by default. One stage per rank.

    Args:
        placement: One stage per rank.
        rows: Rows per microbatch and segment.
        costs: Predicted times, by which W moves into gaps; default one unit per action.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold; None for no cap.
        knobs: Warm-up and W delay per stage.
        link: Transfer times; None for none.

    Raises:
        ScheduleError: If a rank has several stages, or the memory does not suffice.
    """
    unit = costs or _unit_costs(placement, rows)
    return tune_zero_bubble(
        placement, rows, unit, max_bytes=max_bytes, knobs=knobs, link=link, num_steps=0
    ).schedule


def tune_zero_bubble(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: float | None = None,
    knobs: Knobs | None = None,
    link: Link | None = None,
    num_steps: int = 1000,
    may_reorder: bool = True,
    seed: int = 0,
) -> Tuned:
    """Tune warm-up, W delay and (without deferral) the order of the microbatches.

    Args:
        placement: One stage per rank.
        rows: Rows per microbatch and segment.
        costs: Predicted times and bytes.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold; None for no cap.
        knobs: Where the search starts; default ZB-H1.
        link: Transfer times; None for none.
        num_steps: Orders to try; one takes about 10 us for 8 stages and 32 microbatches.
        may_reorder: Whether microbatches may change places. Ignored where samples are deferred.
        seed: Of the search. Equal arguments give an equal result on every machine.

    Raises:
        ScheduleError: If a rank has several stages, or the memory does not suffice.
    """
    from lightning_entrain.schedule import zb_kernel

    if placement.num_ranks != placement.num_stages:
        raise ScheduleError(
            f"{placement.num_stages} stages on {placement.num_ranks} ranks",
            limit="zero bubble by static order needs one stage per rank",
            remedy="use build_list_schedule",
        )
    num_stages, num = placement.num_stages, rows.num_microbatches
    tables = cost_tables(placement, rows, costs, max_bytes=max_bytes, link=link)
    order = np.arange(num, dtype=np.int64)
    caps = np.full(num_stages, memory_cap(max_bytes, num), dtype=np.int64)
    warmup, delay = _start(order, tables, caps, knobs or Knobs.zb_h1(num_stages))
    codes = np.zeros((num_stages, 3 * num), dtype=np.int64)
    done = np.full((num_stages, 3 * num), -1, dtype=np.int64)
    if num:
        free_order = may_reorder and rows.max_lag == 0
        zb_kernel.climb(order, tables, caps, warmup, delay, num_steps, free_order, seed + 1)
        makespan = zb_kernel.evaluate(
            order, tables, caps, warmup, delay, codes, done, zb_kernel.STUCK
        )
        if makespan == zb_kernel.STUCK:
            raise ScheduleError(
                f"No zero-bubble order fits into max_bytes {max_bytes}",
                limit="at least the activations of the largest microbatch on each stage",
                remedy="raise the memory budget or use more, smaller microbatches",
            )
    tuned = Tuned(
        schedule=Schedule(name="zero_bubble", placement=placement, ranks=()),
        order=tuple(order.tolist()),
        knobs=Knobs(warmup=tuple(warmup.tolist()), weight_delay=tuple(delay.tolist())),
    )
    graph = StepGraph(placement, tuned.reorder_rows(rows))
    ranks: list[tuple[Action, ...]] = [()] * placement.num_ranks
    for stage, rank in enumerate(placement.stage_to_rank):
        ranks[rank] = tuple(
            action
            for code in done[stage].tolist()
            if code >= 0
            for action in actions_of(graph, stage, code // 3, code % 3)
        )
    return replace(tuned, schedule=replace(tuned.schedule, ranks=tuple(ranks)))


def _start(order: Ints, tables: Ints, caps: Ints, knobs: Knobs) -> tuple[Ints, Ints]:
    """The knobs, or the best of those with less warm-up where unequal memory stops them."""
    from lightning_entrain.schedule import zb_kernel

    codes = np.zeros((tables.shape[1], 3 * tables.shape[2]), dtype=np.int64)
    done = np.zeros_like(codes)
    best, found = zb_kernel.STUCK, (np.array(knobs.warmup), np.array(knobs.weight_delay))
    if not len(order):
        return found
    for limit in range(max(knobs.warmup), 0, -1):
        warmup = np.minimum(knobs.warmup, limit).astype(np.int64)
        delay = np.minimum(knobs.weight_delay, limit - 1).astype(np.int64)
        if limit == max(knobs.warmup):
            delay = np.array(knobs.weight_delay, dtype=np.int64)
        makespan = zb_kernel.evaluate(order, tables, caps, warmup, delay, codes, done, best)
        if makespan < best:
            best, found = makespan, (warmup, delay)
    return found


def actions_of(graph: StepGraph, stage: int, position: int, kind: int) -> list[Action]:
    """Actions of one code of the kernels: F, I or W (0, 1, 2) of one position; none if empty.

    On encoder stages I and W of position j cover the segments that end in LLM microbatch j.
    """
    name = (ActionKind.F, ActionKind.I, ActionKind.W)[kind]
    if kind == 0 or not graph.is_encoder(stage):
        counts = graph.rows.encoder if graph.is_encoder(stage) else graph.rows.llm
        return [Action(stage, name, position)] if counts[position] else []
    actions = []
    for k in graph.by_target.get(position, ()):
        whole = len(graph.by_source[k]) == 1
        actions.append(Action(stage, name, k, None if whole else position))
    return actions


def memory_cap(max_bytes: float | None, num_microbatches: int) -> int:
    """The cap in the kernels' unit; a little more than it for sizes that were rounded up."""
    if max_bytes is None:
        return 1 << 59
    return _MEMORY_UNITS + 4 * num_microbatches


def cost_tables(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: float | None,
    link: Link | None,
) -> Ints:
    """Costs as integers in the kernels' layout, ``[7, stages, microbatches]``."""
    if max_bytes is not None and not max_bytes > 0:
        raise ScheduleError(f"max_bytes is {max_bytes}", limit="more than 0")
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
    # fsum: numpy's order of summation depends on the machine, and all ranks must agree.
    mean = math.fsum(costs.forward_ms.ravel().tolist()) / max(costs.forward_ms.size, 1)
    tables = np.zeros(times.shape, dtype=np.int64)
    tables[:5] = np.round(times[:5] * (_TIME_UNITS / (mean or 1.0)))
    largest = float(times[5].max()) if times.size else 0.0
    # Without a cap the sizes do not matter; they only have to stay small.
    unit = _MEMORY_UNITS / (max_bytes or max(largest, 1e-300) * 1024)
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


def _unit_costs(placement: Placement, rows: RowCounts) -> StepCosts:
    ones = np.ones((placement.num_stages, rows.num_microbatches))
    return StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)


def tune_ramp(
    stage_ms: Sequence[float],
    num_microbatches: int,
    *,
    max_live: float,
    overhead_ms: float = 0.0,
    input_factor: float = 1.0,
    weight_factor: float = 1.0,
    lightest: float = 0.25,
    heaviest: float = 1.15,
    num_steps: int = 20_000,
    seed: int = 0,
) -> tuple[tuple[float, ...], Knobs]:
    """Load per microbatch with which zero bubble runs fastest: lighter ones shorten the fill.

    Computed once per plan; samples are then assigned to it (``assign_samples(ramp=...)``).

    Args:
        stage_ms: Forward time of the mean microbatch on each stage, one stage per rank.
        num_microbatches: Length of the profile.
        max_live: Memory of a rank in mean microbatches.
        overhead_ms: Added to every action.
        input_factor: Time of I over that of F.
        weight_factor: Time of W over that of F.
        lightest: Least load, relative to the mean.
        heaviest: Greatest load.
        num_steps: Profiles to try; one takes about 20 us for 8 stages and 32 microbatches.
        seed: Of the search.

    Returns:
        Relative loads with mean 1, and the knobs tuned for them.

    Raises:
        ScheduleError: If the memory does not suffice for any order.
    """
    from lightning_entrain.schedule import ramp_kernel, zb_kernel

    num_stages = len(stage_ms)
    start = Knobs.zb_h1(num_stages)
    warmup = np.array(start.warmup, dtype=np.int64)
    delay = np.array(start.weight_delay, dtype=np.int64)
    profile = _linear_ramp(num_microbatches, num_stages, lightest, heaviest)
    scale = _TIME_UNITS / max(math.fsum(stage_ms) / num_stages, 1e-300) / 1024
    makespan = ramp_kernel.climb_profile(
        profile,
        np.round(np.asarray(stage_ms) * scale).astype(np.int64),
        np.full(num_stages, int(max_live * 1024), dtype=np.int64),
        round(overhead_ms * scale * 1024),
        np.array([round(1000 * input_factor), round(1000 * weight_factor)], dtype=np.int64),
        int(lightest * 1024),
        int(heaviest * 1024),
        warmup,
        delay,
        num_steps,
        seed + 1,
    )
    if makespan == zb_kernel.STUCK:
        raise ScheduleError(
            f"No zero-bubble order fits into {max_live} microbatches per rank",
            limit="at least one",
            remedy="raise the memory budget",
        )
    knobs = Knobs(warmup=tuple(warmup.tolist()), weight_delay=tuple(delay.tolist()))
    return tuple((profile / 1024).tolist()), knobs


def _linear_ramp(num: int, num_stages: int, lightest: float, heaviest: float) -> Ints:
    """Rise over the first microbatches as far as the bounds and the mean allow; integers."""
    width = min(num_stages, num)
    top = min(heaviest, 1.12)
    edge = max(lightest, 0.4)
    shape = np.minimum(edge + (top - edge) * np.arange(num) / width, top)
    profile: Ints = np.floor(shape / (math.fsum(shape) / num) * 1024).astype(np.int64)
    low, high = int(lightest * 1024), int(heaviest * 1024)
    if profile.min() < low or profile.max() > high - 1:
        profile = np.full(num, 1024, dtype=np.int64)
    profile[: num * 1024 - int(profile.sum())] += 1
    return profile
