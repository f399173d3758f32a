"""List scheduling for ranks with several stages, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a search runs. All times and sizes
are integers, so that the compiled and the interpreted code go through the same states.
"""

from __future__ import annotations

import numpy as np

from lightning_entrain.schedule.replay import jit
from lightning_entrain.schedule.zb_kernel import (
    ADD,
    F_DELAY,
    FREE,
    I_DELAY,
    STUCK,
    W_TIME,
    Ints,
    draw,
    nudge,
)

FORWARD, INPUT, WEIGHT = range(3)
NONE = -1


@jit
def fits(
    s: int,
    rank_of: Ints,
    order: Ints,
    tables: Ints,
    next_f: Ints,
    held: int,
    cap: int,
) -> bool:
    """Whether F may run on a stage and still leave room for older microbatches on its rank.

    Without that room the rank could fill with microbatches that never come back.
    """
    num = len(order)
    p = next_f[s]
    need = held + tables[ADD, s, order[p]]
    for other in range(len(rank_of)):
        if other != s and rank_of[other] == rank_of[s]:
            q = next_f[other]
            if q < num and (q < p or (q == p and other > s)):
                need += tables[ADD, other, order[q]]
    return need <= cap


@jit
def choose(
    rank: int,
    free_at: int,
    rank_of: Ints,
    order: Ints,
    tables: Ints,
    counters: Ints,
    ends: Ints,
    held: int,
    cap: int,
    warmup: Ints,
    delay: Ints,
) -> tuple[int, int, int]:
    """What a rank does next: (start, stage, kind); kind is NONE if it has to wait.

    Among what can start first: W where too many are pending, then I, then F, then any W. A W does
    not delay an I or F that is known to become ready before its end.
    """
    num_stages, num = tables.shape[1], tables.shape[2]
    start, stage, kind = STUCK, 0, NONE
    best_p = num
    fill_stage, fill_pending = NONE, 0
    for s in range(num_stages - 1, -1, -1):
        if rank_of[s] != rank:
            continue
        f, i, w = counters[FORWARD, s], counters[INPUT, s], counters[WEIGHT, s]
        if i - w > delay[s]:
            return free_at, s, WEIGHT
        if i - w > fill_pending:
            fill_stage, fill_pending = s, i - w
        if i < f:
            ready = ends[INPUT, s + 1, i] if s + 1 < num_stages else 0
            if ready < STUCK and s + 1 < num_stages:
                ready += tables[I_DELAY, s + 1, order[i]]
            ready = max(ready, free_at)
            if ready < start or (ready == start and (kind != INPUT or i < best_p)):
                start, stage, kind, best_p = ready, s, INPUT, i
        if f < num and (f - i < warmup[s]):
            ready = ends[FORWARD, s - 1, f] if s > 0 else 0
            if ready < STUCK and s > 0:
                ready += tables[F_DELAY, s - 1, order[f]]
            ready = max(ready, free_at)
            if ready < start and fits(s, rank_of, order, tables, counters[FORWARD], held, cap):
                start, stage, kind, best_p = ready, s, FORWARD, f
    if fill_stage != NONE:
        length = tables[W_TIME, fill_stage, order[counters[WEIGHT, fill_stage]]]
        if start >= STUCK or free_at + length <= start:
            return free_at, fill_stage, WEIGHT
    if start >= STUCK:
        return STUCK, 0, NONE
    return start, stage, kind


@jit
def run_list(
    rank_of: Ints,
    num_ranks: int,
    order: Ints,
    tables: Ints,
    caps: Ints,
    warmup: Ints,
    delay: Ints,
    done: Ints,
    limit: int,
) -> int:
    """Always do next what can start first; fill ``done`` with the order of every rank.

    Args:
        rank_of: Rank per stage.
        num_ranks: Number of ranks.
        order: Microbatch at each position.
        tables: Durations, delays and memory as for ``zb_kernel``.
        caps: Memory per rank.
        warmup: Per stage the microbatches with F begun and I not ended that are allowed.
        delay: Per stage the W that may be pending before they go first.
        done: ``[ranks, actions]``, filled with (stage * microbatches + position) * 3 + kind.
        limit: Give up when an action ends later.

    Returns:
        End of the last action, or STUCK.
    """
    num_stages, num = tables.shape[1], tables.shape[2]
    ends = np.full((2, num_stages, num), STUCK)
    counters = np.zeros((3, num_stages), np.int64)
    free_at = np.zeros(num_ranks, np.int64)
    held = np.zeros(num_ranks, np.int64)
    num_done = np.zeros(num_ranks, np.int64)
    picks = np.zeros((3, num_ranks), np.int64)
    stale = np.ones(num_ranks, np.bool_)
    done[:] = NONE
    makespan = 0
    for _ in range(3 * num_stages * num):
        rank = 0
        for r in range(num_ranks):
            if stale[r]:
                picks[0, r], picks[1, r], picks[2, r] = choose(
                    r,
                    free_at[r],
                    rank_of,
                    order,
                    tables,
                    counters,
                    ends,
                    held[r],
                    caps[r],
                    warmup,
                    delay,
                )
                stale[r] = False
            if picks[0, r] < picks[0, rank]:
                rank = r
        start, s, kind = picks[0, rank], picks[1, rank], picks[2, rank]
        if kind == NONE:
            return STUCK
        p = counters[kind, s]
        m = order[p]
        end = start + tables[kind, s, m]
        if end > limit:
            return STUCK
        counters[kind, s] += 1
        free_at[rank] = end
        makespan = max(makespan, end)
        done[rank, num_done[rank]] = (s * num + p) * 3 + kind
        num_done[rank] += 1
        stale[rank] = True
        if kind == WEIGHT:
            held[rank] -= tables[FREE, s, m]
            continue
        ends[kind, s, p] = end
        if kind == FORWARD:
            held[rank] += tables[ADD, s, m]
        neighbour = s + 1 if kind == FORWARD else s - 1
        if 0 <= neighbour < num_stages:
            stale[rank_of[neighbour]] = True
    return makespan


@jit
def rerun(rank_of: Ints, order: Ints, tables: Ints, codes: Ints, done: Ints, limit: int) -> int:
    """Run given lists in other times; weight gradients move forward into gaps that they fit in.

    Args:
        rank_of: Rank per stage.
        order: Microbatch at each position.
        tables: Durations and delays.
        codes: From :func:`run_list`.
        done: Filled likewise with the order that ran.
        limit: Give up when an action ends later.

    Returns:
        End of the last action, or STUCK.
    """
    num_ranks = len(codes)
    num_stages, num = tables.shape[1], tables.shape[2]
    ends = np.full((2, num_stages, num), STUCK)
    counters = np.zeros((3, num_stages), np.int64)
    now = np.zeros(num_ranks, np.int64)
    place = np.zeros(num_ranks, np.int64)
    num_done = np.zeros(num_ranks, np.int64)
    done[:] = NONE
    left = 3 * num_stages * num
    while left > 0:
        before = left
        for r in range(num_ranks):
            while place[r] < codes.shape[1] and codes[r, place[r]] != NONE:
                code = codes[r, place[r]]
                kind, s, p = code % 3, code // 3 // num, code // 3 % num
                if kind == WEIGHT and p < counters[WEIGHT, s]:
                    place[r] += 1  # a gap has taken it
                    continue
                ready = now[r]
                source = s - 1 if kind == FORWARD else s + 1
                if kind != WEIGHT and 0 <= source < num_stages:
                    if ends[kind, source, p] == STUCK:
                        break
                    ready = ends[kind, source, p] + tables[F_DELAY + kind, source, order[p]]
                while now[r] < ready:
                    fill, most = NONE, 0
                    for other in range(num_stages):
                        pending = counters[INPUT, other] - counters[WEIGHT, other]
                        if rank_of[other] == r and pending > most:
                            length = tables[W_TIME, other, order[counters[WEIGHT, other]]]
                            if now[r] + length <= ready:
                                fill, most = other, pending
                    if fill == NONE:
                        break
                    now[r] += tables[W_TIME, fill, order[counters[WEIGHT, fill]]]
                    done[r, num_done[r]] = (fill * num + counters[WEIGHT, fill]) * 3 + WEIGHT
                    num_done[r] += 1
                    counters[WEIGHT, fill] += 1
                    left -= 1
                now[r] = max(now[r], ready) + tables[kind, s, order[p]]
                if kind != WEIGHT:
                    ends[kind, s, p] = now[r]
                counters[kind, s] += 1
                done[r, num_done[r]] = code
                num_done[r] += 1
                left -= 1
                place[r] += 1
            if now[r] > limit:
                return STUCK
        if left == before:
            return STUCK
    return now.max()


@jit
def evaluate_list(
    rank_of: Ints,
    order: Ints,
    planned: Ints,
    tables: Ints,
    caps: Ints,
    warmup: Ints,
    delay: Ints,
    codes: Ints,
    done: Ints,
    limit: int,
) -> int:
    """Makespan in the times of ``tables`` of the lists that suit the times of ``planned``.

    Small differences between microbatches lead a list schedule astray (it begins something long
    just before what matters becomes ready), so lists are made with each stage's mean times.
    """
    found = run_list(rank_of, len(codes), order, planned, caps, warmup, delay, codes, STUCK - 1)
    if found == STUCK:
        return STUCK
    return rerun(rank_of, order, tables, codes, done, limit)


@jit
def climb_list(
    rank_of: Ints,
    num_ranks: int,
    order: Ints,
    planned: Ints,
    tables: Ints,
    caps: Ints,
    warmup: Ints,
    delay: Ints,
    num_steps: int,
    may_reorder: bool,
    seed: int,
) -> int:
    """Hill climb as ``zb_kernel.climb``, on list schedules; changes order, warm-up and delay."""
    num_stages, num = tables.shape[1], tables.shape[2]
    codes = np.zeros((num_ranks, 3 * num_stages * num), np.int64)
    done = np.zeros((num_ranks, 3 * num_stages * num), np.int64)
    best = evaluate_list(rank_of, order, planned, tables, caps, warmup, delay, codes, done, STUCK)
    state = seed * 2654435761 % 2147483648
    for _ in range(num_steps):
        state = draw(state)
        is_nudge = not may_reorder or (state >> 16) % 2 == 0
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
        found = evaluate_list(
            rank_of, order, planned, tables, caps, warmup, delay, codes, done, best
        )
        if found <= best:
            best = found
        elif is_nudge:
            warmup[s], delay[s] = old_warmup, old_delay
        else:
            order[p], order[q] = order[q], order[p]
    return best
