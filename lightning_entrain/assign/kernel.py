"""The inner loop of the joint search, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a search runs. Everything in it is
integer arithmetic below 2^63 on flat sequences, so that the compiled code (on arrays) and the
interpreted code (on lists) go through exactly the same states.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeVar

import numpy as np

try:
    from numba import njit
except ImportError:  # Slower, same result.
    njit = None

_Function = TypeVar("_Function", bound=Callable[..., Any])
Numbers = MutableSequence[int]


def _jit(function: _Function) -> _Function:
    return function if njit is None else njit(cache=True, nogil=True)(function)


MULTIPLIER = 698769069
"""Of the multiply-with-carry generator: 32 bits of value and a carry, period about 2^60."""

NUM_IMAGES, MAX_LAG, MAX_TOKENS, CEILING, WINDOW, SWAP_BITS, MOVE_BITS = range(7)
"""Positions in ``rules``.

NUM_IMAGES: samples 0 up to this have encoder work, the rest are text-only. MAX_LAG: 0 or 1.
MAX_TOKENS: cap per microbatch, 0 for none. CEILING: largest encoder plus LLM residual that a
microbatch touched by a step may have, 0 for no such rule. WINDOW: how far apart in the samples'
order the partners of a local exchange may be. SWAP_BITS, MOVE_BITS: of 4096 steps those up to
SWAP_BITS are exchanges, then up to MOVE_BITS moves, the rest lag flips.
"""

ENCODER, LLM, TOKENS, LLM_TOKENS = range(4)
"""Rows: of ``weight`` the first three, of ``slot`` the first two, of ``load`` all four."""

_LOW = 0xFFFFFFFF


@_jit
def anneal(
    weight: Sequence[Numbers],
    slot: Sequence[Numbers],
    load: Sequence[Numbers],
    rules: Numbers,
    thresholds: Numbers,
    schedule: Numbers,
) -> None:
    """Simulated annealing over exchanges, moves and lags; changes ``slot`` and ``load``.

    Args:
        weight: Encoder, LLM and token weight per sample.
        slot: Encoder and LLM microbatch per sample; -1 for text-only samples' encoder.
        load: Per microbatch encoder and LLM load minus target, encoder and LLM tokens.
        rules: See above.
        thresholds: 1024 quantiles of -ln(uniform), times 2^16.
        schedule: Seed (below 2^62, not 0), blocks of 256 steps, start temperature (a squared
            load), factor per block times 2^20, final blocks at temperature 0.
    """
    num_samples = len(weight[0])
    num_bins = len(load[0])
    state = schedule[0]
    temperature = schedule[2]
    for block in range(schedule[1] + schedule[4]):
        temperature = (temperature * schedule[3]) >> 20
        if block >= schedule[1]:
            temperature = 0
        for _ in range(256):
            state = MULTIPLIER * (state & _LOW) + (state >> 32)
            first = (state ^ (state >> 32)) & _LOW
            state = MULTIPLIER * (state & _LOW) + (state >> 32)
            second = (state ^ (state >> 32)) & _LOW
            i = ((first >> 12) * num_samples) >> 20
            kind = first & 0xFFF
            place = second >> 12
            limit = (temperature * thresholds[second & 1023]) >> 16
            if kind < rules[SWAP_BITS]:
                # Every third exchange is among samples of like size: it fine-tunes.
                if kind % 3 == 0:
                    j = (i + 1 + ((place * rules[WINDOW]) >> 20)) % num_samples
                else:
                    j = (place * num_samples) >> 20
                _exchange(i, j, limit, weight, slot, load, rules)
            elif kind < rules[MOVE_BITS] or rules[MAX_LAG] == 0:
                k = (place * num_bins) >> 20
                lag = (second >> 10) & rules[MAX_LAG]
                if i >= rules[NUM_IMAGES]:
                    _move(i, -1, k, limit, weight, slot, load, rules)
                else:
                    _move(i, k, min(k + lag, num_bins - 1), limit, weight, slot, load, rules)
            elif i < rules[NUM_IMAGES]:
                k = slot[ENCODER][i]
                j = 2 * k + 1 - slot[LLM][i]
                if j < num_bins:
                    _move(i, k, j, limit, weight, slot, load, rules)


@_jit
def _exchange(
    i: int,
    j: int,
    limit: int,
    weight: Sequence[Numbers],
    slot: Sequence[Numbers],
    load: Sequence[Numbers],
    rules: Numbers,
) -> None:
    """Exchange the places of two samples if the squared loads rise by at most 2 * limit."""
    a, b = slot[ENCODER][i], slot[ENCODER][j]
    p, q = slot[LLM][i], slot[LLM][j]
    if i >= rules[NUM_IMAGES] or j >= rules[NUM_IMAGES]:
        # A text-only sample has no encoder place: only the LLM places are exchanged, if the
        # other sample may be decoded there.
        if i < rules[NUM_IMAGES] and (q < a or q > a + rules[MAX_LAG]):
            return
        if j < rules[NUM_IMAGES] and (p < b or p > b + rules[MAX_LAG]):
            return
        b = a
    d = 0
    rise = 0
    if a != b:
        d = weight[ENCODER][j] - weight[ENCODER][i]
        rise = d * (load[ENCODER][a] - load[ENCODER][b] + d)
    f = 0
    if p != q:
        f = weight[LLM][j] - weight[LLM][i]
        rise += f * (load[LLM][p] - load[LLM][q] + f)
    if rise > limit:
        return
    if rules[CEILING] > 0 and not _below_ceiling(a, b, d, p, q, f, load, rules[CEILING]):
        return
    if rules[MAX_TOKENS] > 0:
        t = weight[TOKENS][j] - weight[TOKENS][i]
        if not _fits(a, b, t, load[TOKENS], rules) or not _fits(p, q, t, load[LLM_TOKENS], rules):
            return
        _shift(a, b, t, load[TOKENS])
        _shift(p, q, t, load[LLM_TOKENS])
    if a != b:
        _shift(a, b, d, load[ENCODER])
        slot[ENCODER][i], slot[ENCODER][j] = b, a
    _shift(p, q, f, load[LLM])
    slot[LLM][i], slot[LLM][j] = q, p


@_jit
def _move(
    i: int,
    k: int,
    j: int,
    limit: int,
    weight: Sequence[Numbers],
    slot: Sequence[Numbers],
    load: Sequence[Numbers],
    rules: Numbers,
) -> None:
    """Move a sample to encoder microbatch ``k`` and LLM microbatch ``j`` by the same rule."""
    a, p = slot[ENCODER][i], slot[LLM][i]
    d = 0
    rise = 0
    if a != k:
        d = -weight[ENCODER][i]
        rise = d * (load[ENCODER][a] - load[ENCODER][k] + d)
    f = 0
    if p != j:
        f = -weight[LLM][i]
        rise += f * (load[LLM][p] - load[LLM][j] + f)
    if rise > limit:
        return
    if rules[CEILING] > 0 and not _below_ceiling(a, k, d, p, j, f, load, rules[CEILING]):
        return
    if rules[MAX_TOKENS] > 0:
        t = -weight[TOKENS][i]
        if not _fits(a, k, t, load[TOKENS], rules) or not _fits(p, j, t, load[LLM_TOKENS], rules):
            return
        _shift(a, k, t, load[TOKENS])
        _shift(p, j, t, load[LLM_TOKENS])
    if a != k:
        _shift(a, k, d, load[ENCODER])
        slot[ENCODER][i] = k
    if p != j:
        _shift(p, j, f, load[LLM])
        slot[LLM][i] = j


@_jit
def _shift(a: int, b: int, amount: int, row: Numbers) -> None:
    """Take ``amount`` from entry ``b`` to entry ``a``."""
    if a != b:
        row[a] += amount
        row[b] -= amount


@_jit
def _fits(a: int, b: int, t: int, tokens: Numbers, rules: Numbers) -> bool:
    """Whether ``t`` tokens may go from microbatch ``b`` to ``a``."""
    if a == b:
        return True
    return tokens[a] + t <= rules[MAX_TOKENS] and tokens[b] - t <= rules[MAX_TOKENS]


@_jit
def _below_ceiling(
    a: int, b: int, d: int, p: int, q: int, f: int, load: Sequence[Numbers], ceiling: int
) -> bool:
    """Whether encoder plus LLM load stay below the ceiling in all touched microbatches."""
    for k in (a, b, p, q):
        if k >= 0:
            total = load[ENCODER][k] + load[LLM][k]
            if a != b:
                total += d * ((k == a) - (k == b))
            if p != q:
                total += f * ((k == p) - (k == q))
            if total > ceiling:
                return False
    return True


IS_COMPILED = hasattr(anneal, "py_func")
"""Whether numba is at work."""


def as_kernel(rows: Sequence[Sequence[int]] | Sequence[int]) -> Any:
    """Rows in the form the kernel runs fastest on: an int64 array, or lists when interpreted."""
    if IS_COMPILED:
        return np.array(rows, dtype=np.int64)
    return [list(row) if isinstance(row, Sequence) else row for row in rows]
