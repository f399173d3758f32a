"""Zero-bubble orders and their search, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a search runs. All times and sizes
are integers, so that the compiled and the interpreted code go through the same states.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.schedule.replay import jit

Ints = NDArray[np.int64]
FORWARD, INPUT, WEIGHT = range(3)
STUCK = 1 << 60
"""Makespan of an order that cannot run: it exceeds the memory or waits for ever."""

F_TIME, I_TIME, W_TIME, F_DELAY, I_DELAY, ADD, FREE = range(7)
"""Rows of ``tables``, ``[7, stages, microbatches]``: durations of F, I and W; time from the end of
F (or I) on a stage to its tensor's arrival on the next (or previous) one; memory that F allocates
and that W frees."""


@jit
def list_order(
    order: Ints,
    add: Ints,
    free: Ints,
    cap: int,
    warmup: int,
    delay: int,
    codes: Ints,
) -> int:
    """Static order of one stage: warm-up F, then I, W delayed, F, under a memory cap.

    Args:
        order: Microbatch at each position, ``[microbatches]``.
        add: What F of each microbatch allocates.
        free: What W of each microbatch frees.
        cap: Most that may be held.
        warmup: Microbatches with F begun and I not ended that the stage aims at.
        delay: Weight gradients that it leaves pending after each I.
        codes: Filled with 3 * position + kind.

    Returns:
        Number of codes, or -1 if the memory does not suffice.
    """
    num = len(order)
    f = i = w = n = held = 0
    while i < num:
        while f < num and (f - i < warmup or f == i):
            while held + add[order[f]] > cap and w < i:
                held -= free[order[w]]
                codes[n] = 3 * w + WEIGHT
                n += 1
                w += 1
            if held + add[order[f]] > cap:
                if f == i:
                    return -1
                break
            held += add[order[f]]
            codes[n] = 3 * f + FORWARD
            n += 1
            f += 1
        codes[n] = 3 * i + INPUT
        n += 1
        i += 1
        while i - w > delay:
            held -= free[order[w]]
            codes[n] = 3 * w + WEIGHT
            n += 1
            w += 1
    while w < num:
        codes[n] = 3 * w + WEIGHT
        n += 1
        w += 1
    return n


@jit
def run_orders(order: Ints, tables: Ints, codes: Ints, counts: Ints, done: Ints, limit: int) -> int:
    """Run all stages' orders; weight gradients move forward into gaps that they fit in.

    Args:
        order: Microbatch at each position.
        tables: Durations and delays.
        codes: From :func:`list_order`, ``[stages, 3 * microbatches]``.
        counts: Codes per stage.
        done: Filled with the codes in the order they ran.
        limit: Give up when an action ends later.

    Returns:
        End of the last action, or STUCK.
    """
    num_stages, num = tables.shape[1], tables.shape[2]
    ends = np.full((2, num_stages, num), STUCK)
    now = np.zeros(num_stages, np.int64)
    place = np.zeros(num_stages, np.int64)
    num_weights = np.zeros(num_stages, np.int64)
    num_done = np.zeros(num_stages, np.int64)
    num_inputs = np.zeros(num_stages, np.int64)
    left = counts.sum()
    while left > 0:
        before = left
        for sweep in range(2 * num_stages):
            s = sweep if sweep < num_stages else 2 * num_stages - 1 - sweep
            while place[s] < counts[s]:
                code = codes[s, place[s]]
                kind, p = code % 3, code // 3
                m = order[p]
                if kind == WEIGHT:
                    place[s] += 1
                    if p < num_weights[s]:
                        continue  # a gap has taken it
                    now[s] += tables[W_TIME, s, m]
                    num_weights[s] += 1
                    done[s, num_done[s]] = code
                    num_done[s] += 1
                    left -= 1
                    continue
                source = s - 1 if kind == FORWARD else s + 1
                ready = now[s]
                if 0 <= source < num_stages:
                    if ends[kind, source, p] == STUCK:
                        break
                    ready = max(ready, ends[kind, source, p] + tables[F_DELAY + kind, source, m])
                while num_weights[s] < num_inputs[s]:
                    length = tables[W_TIME, s, order[num_weights[s]]]
                    if now[s] + length > ready:
                        break
                    now[s] += length
                    done[s, num_done[s]] = 3 * num_weights[s] + WEIGHT
                    num_done[s] += 1
                    num_weights[s] += 1
                    left -= 1
                now[s] = ready + tables[kind, s, m]
                ends[kind, s, p] = now[s]
                num_inputs[s] += kind
                done[s, num_done[s]] = code
                num_done[s] += 1
                left -= 1
                place[s] += 1
            if now[s] > limit:
                return STUCK
        if left == before:
            return STUCK
    return now.max()


@jit
def evaluate(
    order: Ints,
    tables: Ints,
    caps: Ints,
    warmup: Ints,
    delay: Ints,
    codes: Ints,
    done: Ints,
    limit: int,
) -> int:
    """Makespan of the static orders with these warm-ups and delays; ``done`` gets the order."""
    counts = np.zeros(len(caps), np.int64)
    for s in range(len(caps)):
        counts[s] = list_order(
            order, tables[ADD, s], tables[FREE, s], caps[s], warmup[s], delay[s], codes[s]
        )
        if counts[s] < 0:
            return STUCK
    return run_orders(order, tables, codes, counts, done, limit)


@jit
def draw(state: int) -> int:
    """Next state of a generator of 31 bits; use its upper bits."""
    return (state * 1103515245 + 12345) % 2147483648


@jit
def nudge(warmup: Ints, delay: Ints, stage: int, bits: int, num: int) -> None:
    """Change a stage's warm-up by up to 2 or its delay by up to 3."""
    if bits % 2 == 0:
        warmup[stage] = min(max(warmup[stage] + (bits >> 2) % 5 - 2, 1), num)
    else:
        delay[stage] = min(max(delay[stage] + (bits >> 2) % 7 - 3, 0), num)


@jit
def climb(
    order: Ints,
    tables: Ints,
    caps: Ints,
    warmup: Ints,
    delay: Ints,
    num_steps: int,
    may_reorder: bool,
    seed: int,
) -> int:
    """Hill climb over warm-up and W delay per stage and the order of microbatches, in place.

    Args:
        order: Changed, if ``may_reorder``.
        tables: Durations, delays and memory.
        caps: Memory per stage.
        warmup: Changed.
        delay: Changed.
        num_steps: Orders to try.
        may_reorder: Whether microbatches may change places.
        seed: Of the moves.

    Returns:
        The best makespan, or STUCK if no order ran.
    """
    num_stages, num = tables.shape[1], tables.shape[2]
    codes = np.zeros((num_stages, 3 * num), np.int64)
    done = np.zeros((num_stages, 3 * num), np.int64)
    best = evaluate(order, tables, caps, warmup, delay, codes, done, STUCK)
    state = seed * 2654435761 % 2147483648
    for _ in range(num_steps):
        state = draw(state)
        is_nudge = not may_reorder or (state >> 16) % 4 == 0
        state = draw(state)
        a = state >> 8
        state = draw(state)
        b = state >> 8
        s, p, q = a % num_stages, a % num, b % num
        old_warmup, old_delay = warmup[s], delay[s]
        if is_nudge:
            nudge(warmup, delay, s, b, num)
            if warmup[s] == old_warmup and delay[s] == old_delay:
                continue
        else:
            order[p], order[q] = order[q], order[p]
        found = evaluate(order, tables, caps, warmup, delay, codes, done, best)
        if found <= best:
            best = found
        elif is_nudge:
            warmup[s], delay[s] = old_warmup, old_delay
        else:
            order[p], order[q] = order[q], order[p]
    return best
