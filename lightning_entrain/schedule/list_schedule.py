"""List scheduling with I and W for ranks that hold several stages: V-shaped, colocated, any.

Each rank does next what can start first, I before F before W, within its memory and two tuned
limits per stage. The lists are made with each stage's mean times (or those of a ramp) and then run
in the real ones: see ``list_kernel.evaluate_list``. At last single actions are moved about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.simulate import Link, StepCosts
from lightning_entrain.schedule.tables import MaxBytes, actions_of, cost_tables, memory_caps
from lightning_entrain.schedule.types import Action, Placement, RowCounts, Schedule
from lightning_entrain.schedule.zero_bubble import Knobs, Tuned

Ints = NDArray[np.int64]
_POLISH = 10
"""Moves of single actions per list made; one is some ten times faster."""


def tune_list_schedule(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: MaxBytes = None,
    link: Link | None = None,
    profile: Sequence[float] | None = None,
    num_steps: int = 300,
    may_reorder: bool = True,
    seed: int = 0,
) -> Tuned:
    """Zero bubble for any placement.

    Args:
        placement: Which rank holds which stages.
        rows: Rows per microbatch and segment.
        costs: Predicted times and bytes.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold: one number for
            all, one per rank, or None for no cap.
        link: Transfer times; None for none.
        profile: Relative load per microbatch that the samples were assigned to, if not even.
        num_steps: Orders to try; one takes about 0.2 ms for 16 stages and 32 microbatches.
        may_reorder: Whether microbatches may change places. Ignored where samples are deferred
            and with a profile.
        seed: Of the search. Equal arguments give an equal result on every machine.

    Raises:
        ScheduleError: If the memory does not suffice.
    """
    from lightning_entrain.schedule import list_kernel, polish_kernel

    num_stages, num = placement.num_stages, rows.num_microbatches
    tables = cost_tables(placement, rows, costs, max_bytes=max_bytes, link=link)
    planned = _planned(tables, profile)
    rank_of = np.array(placement.stage_to_rank, dtype=np.int64)
    order = np.arange(num, dtype=np.int64)
    caps = memory_caps(max_bytes, placement.num_ranks, num)
    done = np.full((placement.num_ranks, 3 * num_stages * num), -1, dtype=np.int64)
    best, knobs = climb_lists(
        placement,
        order,
        planned,
        tables,
        caps,
        done,
        num_steps=num_steps,
        may_reorder=may_reorder and rows.max_lag == 0 and profile is None,
        seed=seed,
    )
    if num and best == list_kernel.STUCK:
        raise ScheduleError(
            f"No list schedule fits into max_bytes {max_bytes}",
            limit="at least the activations of the largest microbatch on all stages of a rank",
            remedy="raise the memory budget or use more, smaller microbatches",
        )
    if num:
        polish_kernel.polish(
            rank_of, order, tables, caps, done.copy(), done, _POLISH * num_steps, False, seed + 1
        )
    return replace(decode_lists("list", placement, rows, order, done), knobs=knobs)


def climb_lists(
    placement: Placement,
    order: Ints,
    planned: Ints,
    tables: Ints,
    caps: Ints,
    done: Ints,
    *,
    num_steps: int,
    may_reorder: bool,
    seed: int,
) -> tuple[int, Knobs]:
    """The best of several starts, tuned.

    Args:
        placement: Which rank holds which stages.
        order: Microbatch at each position; changed, if ``may_reorder``.
        planned: Tables to make lists with.
        tables: Tables to run them in.
        caps: Memory per rank.
        done: Filled with the lists, ``[ranks, 3 * stages * microbatches]``.
        num_steps: Lists to try.
        may_reorder: Whether microbatches may change places.
        seed: Of the search.

    Returns:
        Makespan, or ``STUCK`` if the memory does not suffice, and what was tuned.
    """
    from lightning_entrain.schedule import list_kernel

    rank_of = np.array(placement.stage_to_rank, dtype=np.int64)
    common = rank_of, order, planned, tables, caps
    codes = done.copy()
    warmup, delay = np.zeros(0, np.int64), np.zeros(0, np.int64)
    best = list_kernel.STUCK
    for start in _starts(placement.num_stages, len(order)):
        knobs = np.array(start.warmup), np.array(start.weight_delay)
        found = list_kernel.evaluate_list(*common, *knobs, codes, done, best)
        if found < best:
            best, (warmup, delay) = found, knobs
    if len(order) and best < list_kernel.STUCK:
        list_kernel.climb_list(
            rank_of,
            placement.num_ranks,
            order,
            planned,
            tables,
            caps,
            warmup,
            delay,
            num_steps,
            may_reorder,
            seed + 1,
        )
        best = list_kernel.evaluate_list(*common, warmup, delay, codes, done, list_kernel.STUCK)
    return best, Knobs(warmup=tuple(warmup.tolist()), weight_delay=tuple(delay.tolist()))


def decode_lists(
    name: str, placement: Placement, rows: RowCounts, order: Ints, done: Ints
) -> Tuned:
    """Lists of the kernels as a schedule.

    Args:
        name: Of the schedule.
        placement: Which rank holds which stages.
        rows: By microbatch, not yet in order.
        order: Microbatch at each position, ``[microbatches]``.
        done: As from ``list_kernel.run_list``, ``[ranks, actions]``.
    """
    tuned = Tuned(
        schedule=Schedule(name=name, placement=placement, ranks=()), order=tuple(order.tolist())
    )
    graph = StepGraph(placement, tuned.reorder_rows(rows))
    ranks = tuple(_decode(graph, own) for own in done.tolist())
    return replace(tuned, schedule=replace(tuned.schedule, ranks=ranks))


def _decode(graph: StepGraph, codes: list[int]) -> tuple[Action, ...]:
    num = graph.rows.num_microbatches
    return tuple(
        action
        for code in codes
        if code >= 0
        for action in actions_of(graph, code // 3 // num, code // 3 % num, code % 3)
    )


def _starts(num_stages: int, num: int) -> list[Knobs]:
    """Where a search may start: W as late as memory allows, or as early as on the last stages."""
    down = tuple(max(1, min(num_stages - s, num)) for s in range(num_stages))
    late = (max(num, 1),) * num_stages
    early = tuple(range(num_stages))
    return [
        Knobs(warmup=warmup, weight_delay=delay)
        for warmup in (down, late)
        for delay in (late, early, (0,) * num_stages)
    ] + [Knobs(warmup=(1,) * num_stages, weight_delay=(0,) * num_stages)]


def _planned(tables: Ints, profile: Sequence[float] | None) -> Ints:
    """The tables with each stage's mean times; memory stays that of each microbatch."""
    planned = tables.copy()
    num = tables.shape[2]
    shape = np.ones(num) if profile is None else np.asarray(profile, dtype=np.float64)
    if len(shape) != num:
        raise ScheduleError(f"A profile of {len(shape)}", limit=f"one number for each of {num}")
    for row in range(5):
        for stage in range(tables.shape[1]):
            own = tables[row, stage].tolist()
            exists = tables[row, stage] > 0
            total = math.fsum(shape[exists].tolist())
            if total > 0:
                planned[row, stage] = np.round(sum(own) / total * shape * exists)
    return planned
