"""Local search on the lists themselves, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a search runs.
"""

from __future__ import annotations

import numpy as np

from lightning_entrain.schedule.list_kernel import NONE, rerun
from lightning_entrain.schedule.replay import jit
from lightning_entrain.schedule.zb_kernel import ADD, FREE, STUCK, Ints, draw


@jit
def is_legal(own: Ints, length: int, order: Ints, tables: Ints, cap: int) -> bool:
    """Whether a rank's list keeps F, I, W in order on each stage, and its memory."""
    num_stages, num = tables.shape[1], tables.shape[2]
    counters = np.zeros((3, num_stages), np.int64)
    held = 0
    for a in range(length):
        kind, s, p = own[a] % 3, own[a] // 3 // num, own[a] // 3 % num
        if p != counters[kind, s] or (kind > 0 and p >= counters[kind - 1, s]):
            return False
        counters[kind, s] += 1
        if kind == 0:
            held += tables[ADD, s, order[p]]
            if held > cap:
                return False
        elif kind == 2:
            held -= tables[FREE, s, order[p]]
    return True


@jit
def all_legal(codes: Ints, lengths: Ints, order: Ints, tables: Ints, caps: Ints) -> bool:
    """Whether all ranks' lists are legal."""
    legal = True
    for r in range(len(codes)):
        legal = legal and is_legal(codes[r], lengths[r], order, tables, caps[r])
    return legal


@jit
def lengths_of(codes: Ints) -> Ints:
    """Entries of each rank's list."""
    lengths = np.zeros(len(codes), np.int64)
    for r in range(len(codes)):
        while lengths[r] < codes.shape[1] and codes[r, lengths[r]] != NONE:
            lengths[r] += 1
    return lengths


@jit
def move(own: Ints, source: int, dest: int) -> None:
    """Move one entry; those between shift by one."""
    code = own[source]
    step = 1 if dest > source else -1
    for a in range(source, dest, step):
        own[a] = own[a + step]
    own[dest] = code


@jit
def refit(own: Ints, length: int, order: Ints, tables: Ints, cap: int) -> bool:
    """Make a rank's list keep to its memory: what frees some goes before an F that has no room.

    Args:
        own: In F, I, W order on each stage; changed.
        length: Number of entries.
        order: Microbatch at each position.
        tables: For their memory.
        cap: Most that may be held.

    Returns:
        Whether it is legal now.
    """
    num_stages, num = tables.shape[1], tables.shape[2]
    counters = np.zeros((3, num_stages), np.int64)
    held = 0
    for a in range(length):
        source = a
        while source < length:
            kind, s, p = own[source] % 3, own[source] // 3 // num, own[source] // 3 % num
            if kind == 0 and source == a and held + tables[ADD, s, order[p]] <= cap:
                break
            if kind > 0 and p < counters[kind - 1, s] and p == counters[kind, s]:
                break
            source += 1
        if source >= length:
            return False
        move(own, source, a)
        kind, s, p = own[a] % 3, own[a] // 3 // num, own[a] // 3 % num
        counters[kind, s] += 1
        if kind == 0:
            held += tables[ADD, s, order[p]]
        elif kind == 2:
            held -= tables[FREE, s, order[p]]
    return is_legal(own, length, order, tables, cap)


@jit
def polish(
    rank_of: Ints,
    order: Ints,
    tables: Ints,
    caps: Ints,
    codes: Ints,
    done: Ints,
    num_steps: int,
    may_reorder: bool,
    seed: int,
) -> int:
    """Hill climb that moves one action of one rank by a few places, in place.

    Args:
        rank_of: Rank per stage.
        order: Microbatch at each position; changed, if ``may_reorder``.
        tables: Durations, delays and memory as for ``zb_kernel``.
        caps: Memory per rank.
        codes: Lists as from ``list_kernel.run_list``; changed.
        done: Filled with the lists that ran.
        num_steps: Lists to try.
        may_reorder: Whether microbatches may change places; every fourth move then.
        seed: Of the moves.

    Returns:
        The makespan of ``done``, or STUCK if the lists wait for ever.
    """
    num_ranks = len(codes)
    lengths = lengths_of(codes)
    best = rerun(rank_of, order, tables, codes, done, STUCK - 1)
    state = seed * 2654435761 % 2147483648
    for _ in range(num_steps):
        state = draw(state)
        r = (state >> 8) % num_ranks
        if may_reorder and (state >> 20) % 4 == 0:
            state = draw(state)
            p = (state >> 8) % len(order)
            state = draw(state)
            q = (state >> 8) % len(order)
            order[p], order[q] = order[q], order[p]
            found = STUCK
            if all_legal(codes, lengths, order, tables, caps):
                found = rerun(rank_of, order, tables, codes, done, best)
            if found <= best:
                best = found
            else:
                order[p], order[q] = order[q], order[p]
            continue
        state = draw(state)
        source = (state >> 8) % max(lengths[r], 1)
        state = draw(state)
        step = 1 + (state >> 9) % 8
        if (state >> 8) % 2 == 0:
            step = -step
        dest = min(max(source + step, 0), lengths[r] - 1)
        if dest == source or lengths[r] == 0:
            continue
        move(codes[r], source, dest)
        found = STUCK
        if is_legal(codes[r], lengths[r], order, tables, caps[r]):
            found = rerun(rank_of, order, tables, codes, done, best)
        if found <= best:
            best = found
        else:
            move(codes[r], dest, source)
    return rerun(rank_of, order, tables, codes, done, STUCK - 1)
