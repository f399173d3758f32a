"""Templates: the order of a plan's actions, found once by a long search on mean microbatches.

The joint assignment makes microbatches even, or follow given loads, so that what is a good order
for mean microbatches is one for every step: a step only runs it in its own times and moves a few
actions. That is the way to good orders where ranks hold several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.list_schedule import decode_lists
from lightning_entrain.schedule.ramp import linear_ramp
from lightning_entrain.schedule.simulate import Link, StepCosts
from lightning_entrain.schedule.tables import MaxBytes, cost_tables, memory_caps
from lightning_entrain.schedule.template_search import (
    MEAN_LOAD,
    NUM_STARTS,
    SearchState,
    TemplateSearch,
)
from lightning_entrain.schedule.types import Placement, RowCounts
from lightning_entrain.schedule.zero_bubble import Tuned

Ints = NDArray[np.int64]


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
    search = TemplateSearch(placement, stage_ms, max_live, overhead_ms, transfer_ms)
    report = progress or (lambda part: None)
    shapes = [np.full(num_microbatches, MEAN_LOAD, dtype=np.int64)]
    if ramp:
        search.limits[:] = int(lightest * MEAN_LOAD), int(heaviest * MEAN_LOAD)
        # Even loads twice: most searches end better from them than from a ramp.
        shapes = [
            linear_ramp(num_microbatches, placement.num_ranks, lightest, heaviest),
            *shapes * 2,
        ]
    found = _from_waves(search, shapes, num_steps // 3, seed, report)
    if found[0].makespan == search.stuck:
        raise ScheduleError(
            f"No order of {num_microbatches} microbatches fits into {max_live} per rank",
            limit="at least two mean microbatches",
            remedy="raise the memory budget, or plan without a template",
        )
    found += _from_schedules(search, shapes, found, num_steps, seed, report)
    best = min(found, key=lambda state: state.makespan)
    for index, heat in enumerate((0.1, 0.03)):
        search.polish(best, heat=heat, num_steps=num_steps // 6, seed=seed + 90 + index)
        report((5 + index) / 6)
    return Template(
        placement=placement,
        profile=tuple((best.profile / MEAN_LOAD).tolist()),
        codes=tuple(tuple(c for c in own if c >= 0) for own in best.codes.tolist()),
        over_bottleneck=best.makespan / search.bottleneck(num_microbatches),
    )


def _from_waves(
    search: TemplateSearch,
    shapes: Sequence[Ints],
    num_steps: int,
    seed: int,
    report: Callable[[float], None],
) -> list[SearchState]:
    """The fastest orders by when each kind of action is due, best first."""
    found = []
    for index, offsets in enumerate(search.starts()):
        profile = shapes[index % len(shapes)].copy()
        state = SearchState(offsets, profile, search.no_codes(len(profile)))
        search.anneal(state, heat=2.0, num_steps=num_steps // NUM_STARTS, seed=seed + index)
        found.append(state)
        report((index + 1) / NUM_STARTS / 3)
    return sorted(found, key=lambda state: state.makespan)


def _from_schedules(
    search: TemplateSearch,
    shapes: Sequence[Ints],
    waves: Sequence[SearchState],
    num_steps: int,
    seed: int,
    report: Callable[[float], None],
) -> list[SearchState]:
    """Zero-bubble orders where ranks ascend; else list schedules, after more time for the waves."""
    states = [SearchState(waves[0].offsets, x.copy(), search.no_codes(len(x))) for x in shapes]
    if search.is_ascending:
        for index, state in enumerate(states):
            search.zero_bubble(state, num_steps=num_steps // 9, seed=seed + index)
            report(1 / 3 + (index + 1) / len(shapes) / 3)
        return states
    for index, state in enumerate(waves[:2]):
        search.anneal(state, heat=1.0, num_steps=num_steps // 6, seed=seed + 50 + index)
        report((3 + index) / 6)
    for index, state in enumerate(states):
        search.list_schedule(state, num_steps=num_steps // 100, seed=seed + index)
    return states


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
