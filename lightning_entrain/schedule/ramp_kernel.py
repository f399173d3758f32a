"""Search for the load per microbatch that a pipeline runs fastest with.

Importing this module imports numba, so it is imported only when a search runs.
"""

from __future__ import annotations

import numpy as np

from lightning_entrain.schedule.replay import jit
from lightning_entrain.schedule.zb_kernel import (
    ADD,
    F_TIME,
    FREE,
    I_TIME,
    STUCK,
    W_TIME,
    Ints,
    draw,
    evaluate,
    nudge,
)


@jit
def fill(tables: Ints, profile: Ints, shares: Ints, overhead: int, permille: Ints) -> None:
    """Durations and memory of every stage for a profile."""
    for m in range(len(profile)):
        for s in range(len(shares)):
            base = profile[m] * shares[s]
            tables[F_TIME, s, m] = base + overhead
            tables[I_TIME, s, m] = base * permille[0] // 1000 + overhead
            tables[W_TIME, s, m] = base * permille[1] // 1000 + overhead
            tables[ADD, s, m] = profile[m]
            tables[FREE, s, m] = profile[m]


@jit
def shift(profile: Ints, bits: int, more_bits: int) -> None:
    """Move load between a run of up to three microbatches and others; the sum stays."""
    num = len(profile)
    low = bits % num
    if more_bits % 2 == 0:
        low = bits % min(num, 8)  # the ends matter most
    width = min(1 + (bits >> 8) % 3, num - low)
    amount = 1 << ((more_bits >> 2) % 8)
    if (more_bits >> 6) % 2 == 0:
        amount = -amount
    where = (more_bits >> 8) % num
    for j in range(width):
        profile[low + j] += amount
        profile[(where + j * 5) % num] -= amount


@jit
def climb_profile(
    profile: Ints,
    shares: Ints,
    caps: Ints,
    overhead: int,
    permille: Ints,
    lightest: int,
    heaviest: int,
    warmup: Ints,
    delay: Ints,
    num_steps: int,
    seed: int,
) -> int:
    """Hill climb over the relative load of each microbatch, with warm-up and W delay, in place.

    Args:
        profile: Load per microbatch in units of 1/1024 of the mean; its sum is kept.
        shares: Forward time of each stage for a load of one unit.
        caps: Memory per stage in the profile's unit: F of a microbatch holds its load until W.
        overhead: Added to every action.
        permille: Times of I and of W in thousandths of F's.
        lightest: Least load.
        heaviest: Greatest load.
        warmup: Changed.
        delay: Changed.
        num_steps: Profiles to try.
        seed: Of the moves.

    Returns:
        The best makespan, or STUCK if no order ran.
    """
    num_stages, num = len(shares), len(profile)
    tables = np.zeros((7, num_stages, num), np.int64)
    order = np.arange(num)
    codes = np.zeros((num_stages, 3 * num), np.int64)
    done = np.zeros((num_stages, 3 * num), np.int64)
    fill(tables, profile, shares, overhead, permille)
    best = evaluate(order, tables, caps, warmup, delay, codes, done, STUCK)
    kept = profile.copy()
    state = seed * 2654435761 % 2147483648
    for _ in range(num_steps):
        state = draw(state)
        is_nudge = (state >> 16) % 4 == 0
        state = draw(state)
        a = state >> 8
        state = draw(state)
        b = state >> 8
        s = a % num_stages
        old_warmup, old_delay = warmup[s], delay[s]
        if is_nudge:
            nudge(warmup, delay, s, b, num)
        else:
            shift(profile, a, b)
            if profile.min() < lightest or profile.max() > heaviest:
                profile[:] = kept
                continue
            fill(tables, profile, shares, overhead, permille)
        found = evaluate(order, tables, caps, warmup, delay, codes, done, best)
        if found <= best:
            best = found
            kept[:] = profile
        elif is_nudge:
            warmup[s], delay[s] = old_warmup, old_delay
        else:
            profile[:] = kept
            fill(tables, profile, shares, overhead, permille)
    return best
