"""Search for the order of a plan's actions, and for the load of each microbatch, compiled by numba.

Importing this module imports numba, so it is imported only when a search runs. All numbers are
integers, so that the compiled and the interpreted code go through the same states.
"""

from __future__ import annotations

import numpy as np

from lightning_entrain.schedule.list_kernel import NONE, rerun
from lightning_entrain.schedule.polish_kernel import all_legal, is_legal, lengths_of, move
from lightning_entrain.schedule.ramp_kernel import shift
from lightning_entrain.schedule.replay import jit
from lightning_entrain.schedule.zb_kernel import (
    ADD,
    FORWARD,
    FREE,
    INPUT,
    STUCK,
    WEIGHT,
    Ints,
    draw,
)

_ALMOST_STUCK = STUCK - 1


@jit
def spread(base: Ints, overhead: int, profile: Ints, tables: Ints) -> None:
    """Tables of a step whose microbatches have these loads.

    Args:
        base: Durations, delays and memory for a load of one unit, ``[7, stages]``.
        overhead: Added to every action.
        profile: Load per microbatch.
        tables: Filled, as for ``zb_kernel``.
    """
    for row in range(7):
        extra = overhead if row <= WEIGHT else 0
        for s in range(base.shape[1]):
            if base[row, s] > 0:
                for m in range(len(profile)):
                    tables[row, s, m] = base[row, s] * profile[m] + extra


@jit
def lay(own: Ints, offsets: Ints, period: int, tables: Ints, caps: Ints, codes: Ints) -> bool:
    """Lists in which action p of each kind and stage is due at offset + p * period.

    Args:
        own: Stages of each rank, filled up with -1, ``[ranks, most stages of a rank]``.
        offsets: When microbatch 0 is due, ``[3, stages]``.
        period: Between microbatches.
        tables: For their memory.
        caps: Memory per rank.
        codes: Filled as by ``list_kernel.run_list``.

    Returns:
        Whether they keep to the memory.
    """
    num_ranks, width = own.shape
    num = tables.shape[2]
    counters = np.zeros((3, offsets.shape[1]), np.int64)
    due = np.zeros((width, 3), np.int64)
    for r in range(num_ranks):
        length = held = 0
        due[:] = STUCK
        for j in range(width):
            if own[r, j] != NONE:
                due[j, FORWARD] = offsets[FORWARD, own[r, j]]
        while True:
            first, next_j, kind = STUCK, NONE, 0
            for j in range(width):
                for k in range(3):
                    if due[j, k] < first:
                        first, next_j, kind = due[j, k], j, k
            if next_j == NONE:
                break
            s = own[r, next_j]
            p = counters[kind, s]
            codes[r, length] = (s * num + p) * 3 + kind
            length += 1
            if kind == FORWARD:
                held += tables[ADD, s, p]
                if held > caps[r]:
                    return False
            elif kind == WEIGHT:
                held -= tables[FREE, s, p]
            counters[kind, s] += 1
            due[next_j, kind] = STUCK
            if p + 1 < num and (kind == FORWARD or p + 1 < counters[kind - 1, s]):
                due[next_j, kind] = offsets[kind, s] + (p + 1) * period
            if kind < WEIGHT and counters[kind + 1, s] == p:
                due[next_j, kind + 1] = offsets[kind + 1, s] + p * period
    return True


@jit
def shift_offsets(own: Ints, offsets: Ints, period: int, a: int, b: int, c: int) -> None:
    """One random change: what a rank does after what, or how fast a wave of actions runs."""
    r = a % len(own)
    s, k = own[r, (a >> 5) % own.shape[1]], (a >> 9) % 3
    other, other_k = own[r, (b >> 5) % own.shape[1]], (b >> 9) % 3
    if s == NONE or other == NONE:
        return
    what = (a >> 12) % 16
    step = period >> (2 + c % 6)
    if (c >> 4) % 2 == 0:
        step = -step
    if what < 8:
        if s == other and k == other_k:
            return
        # Just before or after another action of the rank, of this microbatch or a neighbour.
        lead = (2 * (offsets[k, s] - offsets[other_k, other]) + period) // (2 * period)
        which = (b >> 12) % 4
        if which < 2:
            lead += 1 - 2 * which
        near = 1 + (c >> 8) % 64
        if (c >> 5) % 2 == 0:
            near = -near
        offsets[k, s] = offsets[other_k, other] + lead * period + near
    elif what < 11:
        offsets[k, s] += step
    elif what < 13:
        offsets[:, s] += step
    elif what < 14:
        offsets[FORWARD, s:] += step
        offsets[INPUT:, :] += step
    else:
        offsets[k, : s + 1] += step
        if k == INPUT:
            offsets[WEIGHT, : s + 1] += step


@jit
def draw_three(state: int) -> tuple[int, int, int, int]:
    """The generator's next state, and three random numbers."""
    first = draw(state)
    second = draw(first)
    third = draw(second)
    return third, first >> 6, second >> 6, third >> 6


@jit
def tolerance(heat: int, step: int, num_steps: int, bits: int) -> int:
    """How much worse a change may be: less and less, and mostly little."""
    left = heat * (num_steps - step) // num_steps
    part = bits % 1024
    return ((left * part) >> 10) * part >> 10


@jit
def change_profile(profile: Ints, kept: Ints, low: int, high: int, a: int, b: int) -> bool:
    """Move load between microbatches, within the limits."""
    shift(profile, a, b)
    if profile.min() < low or profile.max() > high:
        profile[:] = kept
        return False
    return True


@jit
def time_offsets(
    rank_of: Ints,
    own: Ints,
    offsets: Ints,
    period: int,
    tables: Ints,
    caps: Ints,
    lists: Ints,
    done: Ints,
    limit: int,
) -> int:
    """Makespan of the lists that offsets lead to, or STUCK; fills ``lists`` and ``done``."""
    if not lay(own, offsets, period, tables, caps, lists):
        return STUCK
    order = np.arange(tables.shape[2])
    return rerun(rank_of, order, tables, lists, done, min(limit, _ALMOST_STUCK))


@jit
def anneal_offsets(
    rank_of: Ints,
    own: Ints,
    base: Ints,
    overhead: int,
    caps: Ints,
    limits: Ints,
    period: int,
    offsets: Ints,
    profile: Ints,
    codes: Ints,
    heat: int,
    num_steps: int,
    seed: int,
) -> int:
    """Simulated annealing over offsets and loads, in place.

    Args:
        rank_of: Rank per stage.
        own: Stages of each rank.
        base: As for :func:`spread`.
        overhead: Added to every action.
        caps: Memory per rank.
        limits: Least and greatest load of a microbatch; equal to keep the profile.
        period: Between microbatches.
        offsets: As for :func:`lay`; changed.
        profile: Load per microbatch; changed.
        codes: Filled with the best lists, as they ran.
        heat: How much worse a change may be at first.
        num_steps: Changes to try; 0 to only evaluate.
        seed: Of the changes.

    Returns:
        The best makespan, or STUCK.
    """
    tables = np.zeros((7, len(rank_of), len(profile)), np.int64)
    lists = np.full(codes.shape, NONE, np.int64)
    done = lists.copy()
    spread(base, overhead, profile, tables)
    now = time_offsets(rank_of, own, offsets, period, tables, caps, lists, done, STUCK)
    best, best_offsets, best_profile = now, offsets.copy(), profile.copy()
    codes[:] = done
    kept, kept_profile = offsets.copy(), profile.copy()
    state = seed * 2654435761 % 2147483648
    for step in range(num_steps):
        state, a, b, c = draw_three(state)
        is_load = limits[0] < limits[1] and (c >> 15) % 3 == 0
        if is_load:
            if not change_profile(profile, kept_profile, limits[0], limits[1], a, b):
                continue
            spread(base, overhead, profile, tables)
        else:
            shift_offsets(own, offsets, period, a, b, c)
        state = draw(state)
        limit = min(now, _ALMOST_STUCK) + tolerance(heat, step, num_steps, state >> 8)
        found = time_offsets(rank_of, own, offsets, period, tables, caps, lists, done, limit)
        if found <= limit:
            now = found
            kept[:] = offsets
            kept_profile[:] = profile
            if found < best:
                best = found
                best_offsets[:] = offsets
                best_profile[:] = profile
                codes[:] = done
        elif is_load:
            profile[:] = kept_profile
            spread(base, overhead, profile, tables)
        else:
            offsets[:] = kept
    offsets[:] = best_offsets
    profile[:] = best_profile
    return best


@jit
def anneal_lists(
    rank_of: Ints,
    base: Ints,
    overhead: int,
    caps: Ints,
    limits: Ints,
    profile: Ints,
    codes: Ints,
    heat: int,
    num_steps: int,
    seed: int,
) -> int:
    """The same on the lists themselves: single actions move by some places, in place.

    Args:
        rank_of: Rank per stage.
        base: As for :func:`spread`.
        overhead: Added to every action.
        caps: Memory per rank.
        limits: Least and greatest load.
        profile: Changed.
        codes: Lists that can run; changed.
        heat: How much worse a change may be at first.
        num_steps: Changes to try.
        seed: Of the changes.

    Returns:
        The best makespan, which is that of ``codes`` and ``profile``.
    """
    num_ranks = len(codes)
    num_stages, num = len(rank_of), len(profile)
    order = np.arange(num)
    tables = np.zeros((7, num_stages, num), np.int64)
    spread(base, overhead, profile, tables)
    lists, done = codes.copy(), codes.copy()
    lengths = lengths_of(codes)
    now = rerun(rank_of, order, tables, lists, done, _ALMOST_STUCK)
    best, best_profile, kept_profile = now, profile.copy(), profile.copy()
    state = seed * 2654435761 % 2147483648
    for step in range(num_steps):
        state, a, b, c = draw_three(state)
        limit = now + tolerance(heat, step, num_steps, c)
        r = a % num_ranks
        source = b % lengths[r]
        hop = 1 + (a >> 8) % 12
        if (a >> 16) % 2 == 0:
            hop = -hop
        dest = min(max(source + hop, 0), lengths[r] - 1)
        is_load = limits[0] < limits[1] and (c >> 12) % 3 == 0
        if is_load:
            if not change_profile(profile, kept_profile, limits[0], limits[1], a, b):
                continue
            spread(base, overhead, profile, tables)
            legal = all_legal(lists, lengths, order, tables, caps)
        else:
            if dest == source:
                continue
            move(lists[r], source, dest)
            legal = is_legal(lists[r], lengths[r], order, tables, caps[r])
        found = STUCK
        if legal:
            found = rerun(rank_of, order, tables, lists, done, min(limit, _ALMOST_STUCK))
        if found <= limit:
            now = found
            kept_profile[:] = profile
            if found < best:
                best = found
                codes[:] = lists
                best_profile[:] = profile
        elif is_load:
            profile[:] = kept_profile
            spread(base, overhead, profile, tables)
        else:
            move(lists[r], dest, source)
    profile[:] = best_profile
    spread(base, overhead, profile, tables)
    lists[:] = codes
    rerun(rank_of, order, tables, lists, codes, _ALMOST_STUCK)
    return best
