"""Templates: the order of a plan's actions, found once by a long search on mean microbatches.

The joint assignment makes microbatches even, or follow given loads, so that what is a good order
for mean microbatches is one for every step: a step only runs it in its own times and moves a few
actions. That is the way to good orders where ranks hold several stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.list_schedule import climb_lists, decode_lists
from lightning_entrain.schedule.ramp import linear_ramp
from lightning_entrain.schedule.simulate import Link, StepCosts
from lightning_entrain.schedule.tables import (
    TIME_UNITS,
    MaxBytes,
    cost_tables,
    memory_caps,
    per_rank,
)
from lightning_entrain.schedule.types import Placement, RowCounts
from lightning_entrain.schedule.zero_bubble import Knobs, Tuned

Ints = NDArray[np.int64]
_ONE = 1024
"""The mean load of a microbatch."""
_NUM_STARTS = 8
_ROOM = 0.97
"""Part of the memory that a template uses: a step's microbatches are not all alike."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """An order of all actions of a plan with K microbatches.

    Attributes:
        placement: Which rank holds which stages.
        profile: Load of each microbatch, mean 1, to assign samples to; all 1 if even.
        codes: Per rank (stage * K + microbatch) * 3 + kind, kind 0, 1, 2 for F, I, W.
        over_bottleneck: Predicted time over the busiest rank's work, for mean microbatches.
    """

    placement: Placement
    profile: tuple[float, ...]
    codes: tuple[tuple[int, ...], ...]
    over_bottleneck: float

    @property
    def num_microbatches(self) -> int:
        """K."""
        return len(self.profile)

    @property
    def is_ramp(self) -> bool:
        """Whether its microbatches differ."""
        return len(set(self.profile)) > 1

    def fits(self, placement: Placement, rows: RowCounts) -> bool:
        """Whether a step has its layout and number of microbatches."""
        return placement == self.placement and rows.num_microbatches == len(self.profile)


def find_template(
    placement: Placement,
    stage_ms: Sequence[Sequence[float]],
    num_microbatches: int,
    *,
    max_live: MaxBytes,
    overhead_ms: float = 0.0,
    transfer_ms: Sequence[float] | None = None,
    ramp: bool = False,
    lightest: float = 0.1,
    heaviest: float = 1.4,
    num_steps: int = 200_000,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Template:
    """Search for the fastest order, and with ``ramp`` for the loads that it is fastest with.

    Simulated annealing: first over when each kind of action is due on each stage, relative to the
    microbatch before, from several starts; then over single actions.

    Args:
        placement: Which rank holds which stages.
        stage_ms: F, I and W of a mean microbatch on each stage, ``[3, stages]``.
        num_microbatches: K.
        max_live: Memory of a rank in mean microbatches: one number, one per rank, or None.
        overhead_ms: Added to every action.
        transfer_ms: Of a mean microbatch from each stage to the next, ``[stages - 1]``.
        ramp: Whether microbatches may differ.
        lightest: Least load of a microbatch over the mean.
        heaviest: Greatest load.
        num_steps: Orders to try; one takes about 40 us for 16 stages and 32 microbatches.
        seed: Of the search. Equal arguments give an equal result on every machine.
        progress: Called with the part that is done.

    Raises:
        ScheduleError: If no order was found that keeps to the memory.
    """
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches is {num_microbatches}", limit="at least 1")
    search = _Search(placement, stage_ms, max_live, overhead_ms, transfer_ms)
    shapes = [np.full(num_microbatches, _ONE, dtype=np.int64)]
    limits = np.array([_ONE, _ONE], dtype=np.int64)
    if ramp:
        limits[:] = int(lightest * _ONE), int(heaviest * _ONE)
        shapes = [linear_ramp(num_microbatches, placement.num_ranks, lightest, heaviest)]
        shapes += [_geometric_ramp(num_microbatches, low, heaviest) for low in (lightest, 0.2)]
    report = progress or (lambda part: None)
    short = num_steps // 3 // _NUM_STARTS
    found: list[_State] = []
    for index, offsets in enumerate(search.starts()):
        profile = shapes[index % len(shapes)].copy()
        state = _State(offsets, profile, search.no_codes(num_microbatches))
        search.anneal(state, limits, heat=2.0, num_steps=short, seed=seed + index)
        found.append(state)
        report((index + 1) / _NUM_STARTS / 3)
    found.sort(key=lambda state: state.makespan)
    if found[0].makespan == search.stuck:
        raise ScheduleError(
            f"No order of {num_microbatches} microbatches fits into {max_live} per rank",
            limit="at least two mean microbatches",
            remedy="raise the memory budget, or plan without a template",
        )
    best = found[0]
    others = [_State(best.offsets, x.copy(), search.no_codes(num_microbatches)) for x in shapes]
    if search.is_ascending:
        for index, state in enumerate(others):
            search.zero_bubble(state, limits, num_steps=num_steps // 9, seed=seed + index)
            report(1 / 3 + (index + 1) / len(shapes) / 3)
    else:
        for index, state in enumerate(found[:2]):
            search.anneal(state, limits, heat=1.0, num_steps=num_steps // 6, seed=seed + 50 + index)
            report((3 + index) / 6)
        for index, state in enumerate(others):
            search.list_schedule(state, num_steps=num_steps // 100, seed=seed + index)
    found += others
    best = min(found, key=lambda state: state.makespan)
    for index, heat in enumerate((0.1, 0.03)):
        search.polish(best, limits, heat=heat, num_steps=num_steps // 6, seed=seed + 90 + index)
        report((5 + index) / 6)
    return Template(
        placement=placement,
        profile=tuple((best.profile / _ONE).tolist()),
        codes=tuple(tuple(c for c in own if c >= 0) for own in best.codes.tolist()),
        over_bottleneck=best.makespan / search.bottleneck(num_microbatches),
    )


def _geometric_ramp(num: int, lightest: float, heaviest: float) -> Ints:
    """Each microbatch a third heavier than the one before, up to a greatest load."""
    low, high = 1.0, heaviest
    shape = np.ones(num)
    for _ in range(50):
        top = (low + high) / 2
        shape = np.minimum(lightest * 1.33 ** np.arange(num), top)
        if math.fsum(shape.tolist()) < num:
            low = top
        else:
            high = top
    profile: Ints = np.floor(shape / (math.fsum(shape.tolist()) / num) * _ONE).astype(np.int64)
    if profile.min() < lightest * _ONE or profile.max() >= int(heaviest * _ONE):
        return np.full(num, _ONE, dtype=np.int64)
    profile[: num * _ONE - int(profile.sum())] += 1
    return profile


@dataclass
class _State:
    """One of the orders under search."""

    offsets: Ints
    profile: Ints
    codes: Ints
    makespan: int = 0


class _Search:
    """A plan in the kernels' units."""

    def __init__(
        self,
        placement: Placement,
        stage_ms: Sequence[Sequence[float]],
        max_live: MaxBytes,
        overhead_ms: float,
        transfer_ms: Sequence[float] | None,
    ) -> None:
        from lightning_entrain.schedule import template_kernel

        self.kernel = template_kernel
        self.stuck = template_kernel.STUCK
        self.placement = placement
        num_stages, num_ranks = placement.num_stages, placement.num_ranks
        times = [list(map(float, own)) for own in stage_ms]
        if [len(own) for own in times] != [num_stages] * 3:
            raise ScheduleError(
                f"stage_ms has {[len(own) for own in times]} entries",
                limit=f"F, I and W of {num_stages} stages",
            )
        first = placement.first_backward
        scale = 16 * TIME_UNITS / _ONE / max(math.fsum(times[0]) / num_stages, 1e-300)
        self.base = np.zeros((7, num_stages), dtype=np.int64)
        for kind in range(3):
            self.base[kind] = [round(ms * scale) for ms in times[kind]]
        delays = [0.0] * (num_stages - 1) if transfer_ms is None else list(transfer_ms)
        for s, ms in enumerate(delays):
            if placement.stage_to_rank[s] != placement.stage_to_rank[s + 1]:
                self.base[3, s] = self.base[4, s + 1] = round(ms * scale)
        for rank in range(num_ranks):
            own = placement.stages_of(rank)
            whole = math.fsum(times[0][s] for s in own) or 1.0
            self.base[5:, own] = [round(_ONE * times[0][s] / whole) for s in own]
        self.base[1:3, :first] = self.base[5:, :first] = 0
        self.base[4, : first + 1] = 0
        self.overhead = round(overhead_ms * scale * _ONE)
        caps = per_rank(math.inf if max_live is None else max_live, num_ranks)
        self.caps = np.array(
            [1 << 59 if cap == math.inf else int(_ROOM * cap * _ONE * _ONE) for cap in caps],
            dtype=np.int64,
        )
        self.rank_of = np.array(placement.stage_to_rank, dtype=np.int64)
        width = max(len(placement.stages_of(rank)) for rank in range(num_ranks))
        self.own = np.full((num_ranks, width), -1, dtype=np.int64)
        for rank in range(num_ranks):
            self.own[rank, : len(placement.stages_of(rank))] = placement.stages_of(rank)
        self.period = self.bottleneck(1)

    def bottleneck(self, num_microbatches: int) -> int:
        """Work of the busiest rank."""
        each = self.base[:3] * _ONE + self.overhead * (self.base[:3] > 0)
        per_stage = each.sum(axis=0).tolist()
        return num_microbatches * max(
            sum(per_stage[s] for s in self.placement.stages_of(rank))
            for rank in range(self.placement.num_ranks)
        )

    def no_codes(self, num_microbatches: int) -> Ints:
        shape = self.placement.num_ranks, 3 * self.placement.num_stages * num_microbatches
        return np.full(shape, -1, dtype=np.int64)

    def starts(self) -> Iterator[Ints]:
        """One wave of F to the last stage, and one of I back; slower waves hold more memory."""
        forward, backward = (self.base[kind] * _ONE + self.overhead for kind in (0, 1))
        for index in range(_NUM_STARTS):
            slow = 4 + 2 * (index % 4)  # in quarters
            offsets = np.zeros((3, self.placement.num_stages), dtype=np.int64)
            clock = 0
            for s in range(self.placement.num_stages):
                offsets[0, s] = clock
                clock += int(forward[s]) * slow // 4
            for s in range(self.placement.num_stages - 1, -1, -1):
                offsets[1, s] = clock
                clock += int(backward[s])
                offsets[2, s] = clock
            yield offsets

    @property
    def is_ascending(self) -> bool:
        """Whether the stages of each rank follow each other."""
        return tuple(sorted(self.placement.stage_to_rank)) == self.placement.stage_to_rank

    def zero_bubble(self, state: _State, limits: Ints, *, num_steps: int, seed: int) -> None:
        """Start from a zero-bubble order, tuned as if a rank were a stage."""
        from lightning_entrain.schedule import ramp_kernel, zb_kernel

        num_ranks, num = self.placement.num_ranks, len(state.profile)
        groups = [self.placement.stages_of(rank) for rank in range(num_ranks)]
        merged = np.zeros((7, num_ranks), dtype=np.int64)
        for rank, own in enumerate(groups):
            merged[:, rank] = self.base[:, own].sum(axis=1)
        total = merged[:3].sum(axis=1)
        knobs = Knobs.zb_h1(num_ranks)
        warmup, delay = np.array(knobs.warmup), np.array(knobs.weight_delay)
        tables = np.zeros((7, num_ranks, num), dtype=np.int64)
        order = np.arange(num, dtype=np.int64)
        if limits[0] < limits[1]:
            permille = np.round(1000 * total[1:] / max(total[0], 1)).astype(np.int64)
            ramp_kernel.climb_profile(
                state.profile,
                merged[0],
                self.caps // _ONE,
                self.overhead,
                permille,
                limits[0],
                limits[1],
                warmup,
                delay,
                num_steps,
                seed + 1,
            )
        self.kernel.spread(merged, self.overhead, state.profile, tables)
        zb_kernel.climb(order, tables, self.caps, warmup, delay, num_steps // 4, False, seed + 1)
        codes = np.zeros((num_ranks, 3 * num), dtype=np.int64)
        done = np.full((num_ranks, 3 * num), -1, dtype=np.int64)
        state.makespan = zb_kernel.evaluate(
            order, tables, self.caps, warmup, delay, codes, done, self.stuck - 1
        )
        if state.makespan == self.stuck:
            return
        for rank, own in enumerate(groups):
            listed = [
                (s * num + code // 3) * 3 + code % 3
                for code in done[rank].tolist()
                for s in (own if code % 3 == 0 else own[::-1])
            ]
            state.codes[rank, : len(listed)] = listed

    def list_schedule(self, state: _State, *, num_steps: int, seed: int) -> None:
        """Start from a list schedule."""
        num = len(state.profile)
        tables = np.zeros((7, self.placement.num_stages, num), dtype=np.int64)
        self.kernel.spread(self.base, self.overhead, state.profile, tables)
        order = np.arange(num, dtype=np.int64)
        state.makespan = climb_lists(
            self.placement,
            order,
            tables,
            tables,
            self.caps,
            state.codes,
            num_steps=num_steps,
            may_reorder=False,
            seed=seed,
        )[0]

    def anneal(
        self, state: _State, limits: Ints, *, heat: float, num_steps: int, seed: int
    ) -> None:
        state.makespan = self.kernel.anneal_offsets(
            self.rank_of,
            self.own,
            self.base,
            self.overhead,
            self.caps,
            limits,
            self.period,
            state.offsets,
            state.profile,
            state.codes,
            int(heat * 16 * TIME_UNITS),
            num_steps,
            seed + 1,
        )

    def polish(
        self, state: _State, limits: Ints, *, heat: float, num_steps: int, seed: int
    ) -> None:
        state.makespan = self.kernel.anneal_lists(
            self.rank_of,
            self.base,
            self.overhead,
            self.caps,
            limits,
            state.profile,
            state.codes,
            int(heat * 16 * TIME_UNITS),
            num_steps,
            seed + 1,
        )


def follow_template(
    template: Template,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: MaxBytes = None,
    link: Link | None = None,
    num_steps: int = 300,
    may_reorder: bool = True,
    seed: int = 0,
) -> Tuned:
    """Run a template's order in a step's own times, and move single actions while that helps.

    Args:
        template: For this placement and number of microbatches.
        rows: Rows per microbatch and segment.
        costs: Predicted times and bytes.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold: one number for
            all, one per rank, or None for no cap.
        link: Transfer times; None for none.
        num_steps: Orders to try; one takes about 15 us for 16 stages and 32 microbatches.
        may_reorder: Whether microbatches may change places. Ignored where samples are deferred.
        seed: Of the search. Equal arguments give an equal result on every machine.

    Raises:
        ScheduleError: If the order does not suit the step: other shape, or too little memory.
    """
    from lightning_entrain.schedule import polish_kernel

    placement, num = template.placement, template.num_microbatches
    if not template.fits(placement, rows):
        raise ScheduleError(f"{rows.num_microbatches} microbatches", limit=f"the template's {num}")
    tables = cost_tables(placement, rows, costs, max_bytes=max_bytes, link=link)
    caps = memory_caps(max_bytes, placement.num_ranks, num)
    rank_of = np.array(placement.stage_to_rank, dtype=np.int64)
    order = np.arange(num, dtype=np.int64)
    codes = np.full((placement.num_ranks, 3 * placement.num_stages * num), -1, dtype=np.int64)
    done = codes.copy()
    legal = True
    for rank, own in enumerate(template.codes):
        codes[rank, : len(own)] = own
        legal &= polish_kernel.refit(codes[rank], len(own), order, tables, caps[rank])
    found = polish_kernel.STUCK
    if legal:
        free_order = may_reorder and rows.max_lag == 0
        found = polish_kernel.polish(
            rank_of, order, tables, caps, codes, done, num_steps, free_order, seed + 1
        )
    if found == polish_kernel.STUCK:
        raise ScheduleError(
            f"The template's order does not fit into max_bytes {max_bytes}",
            limit="room for the heaviest microbatches in flight",
            remedy="find a template for less memory",
        )
    return decode_lists("template", placement, rows, order, done)
