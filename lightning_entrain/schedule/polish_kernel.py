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
def move(own: Ints, source: int, dest: int) -> None:
    """Move one entry; those between shift by one."""
    code = own[source]
    step = 1 if dest > source else -1
    for a in range(source, dest, step):
        own[a] = own[a + step]
    own[dest] = code


@jit
def polish(
    rank_of: Ints,
    order: Ints,
    tables: Ints,
    caps: Ints,
    codes: Ints,
    done: Ints,
    num_steps: int,
    seed: int,
) -> int:
    """Hill climb that moves one action of one rank by a few places, in place.

    Args:
        rank_of: Rank per stage.
        order: Microbatch at each position.
        tables: Durations, delays and memory as for ``zb_kernel``.
        caps: Memory per rank.
        codes: Lists as from ``list_kernel.run_list``; changed.
        done: Filled with the lists that ran.
        num_steps: Lists to try.
        seed: Of the moves.

    Returns:
        The makespan of ``done``.
    """
    num_ranks = len(codes)
    lengths = np.zeros(num_ranks, np.int64)
    for r in range(num_ranks):
        while lengths[r] < codes.shape[1] and codes[r, lengths[r]] != NONE:
            lengths[r] += 1
    best = rerun(rank_of, order, tables, codes, done, STUCK - 1)
    state = seed * 2654435761 % 2147483648
    for _ in range(num_steps):
        state = draw(state)
        r = (state >> 8) % num_ranks
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
