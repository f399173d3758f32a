"""The inner loop of the joint search, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a search runs. Everything in it is
integer arithmetic below 2^63 on flat sequences, so that the compiled code (on arrays) and the
interpreted code (on lists) go through exactly the same states. Flat and interleaved, because rows
of an array or a tuple of arrays made each step four times slower.
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
    if njit is None:
        return function
    options = {"nogil": True, "forceinline": True}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # No place to write a cache: compile once per process.
        return njit(**options)(function)


MULTIPLIER = 698769069
"""Of the multiply-with-carry generator: 32 bits of value and a carry, period about 2^60."""

NUM_IMAGES, MAX_LAG, MAX_TOKENS, CEILING, WINDOW, EXCHANGES, MOVES = range(7)
"""Positions in ``rules``.

NUM_IMAGES: samples 0 up to this have encoder work, the rest are text-only. MAX_LAG: 0 or 1.
MAX_TOKENS: cap per microbatch, 0 for none. CEILING: largest encoder plus LLM residual that a
microbatch touched by a step may have, 0 for no such rule. WINDOW: how far apart in the samples'
order the partners of a local exchange may be. EXCHANGES, MOVES: of 4096 steps those up to
EXCHANGES are exchanges, then up to MOVES moves, the rest lag flips.
"""

ENCODER, LLM, TOKENS, LLM_TOKENS = range(4)
"""Positions within a sample's three weights and two slots, and within a microbatch's four loads."""

_LOW = 0xFFFFFFFF


@_jit
def anneal(
    weight: Numbers,
    slot: Numbers,
    load: Numbers,
    rules: Numbers,
    thresholds: Numbers,
    schedule: Numbers,
) -> None:
    """Simulated annealing over exchanges, moves and lags; changes ``slot`` and ``load``.

    Args:
        weight: Of each sample in turn its encoder, LLM and token weight.
        slot: Of each sample its encoder and LLM microbatch; -1 for a text-only sample's encoder.
        load: Of each microbatch its encoder and LLM load minus target, encoder and LLM tokens.
        rules: See above.
        thresholds: 1024 quantiles of -ln(uniform), times 2^16.
        schedule: Seed (below 2^62, not 0), blocks of 256 steps, start temperature (a squared
            load), factor per block times 2^20, final blocks at temperature 0.
    """
    num_samples = len(weight) // 3
    num_bins = len(load) // 4
    num_images, max_lag, window = rules[NUM_IMAGES], rules[MAX_LAG], rules[WINDOW]
    exchanges, moves = rules[EXCHANGES], rules[MOVES]
    max_tokens, ceiling = rules[MAX_TOKENS], rules[CEILING]
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
            if kind < exchanges:
                # Every third exchange is among samples of like size: it fine-tunes.
                if kind % 3 == 0:
                    j = i + 1 + ((place * window) >> 20)
                    j = j if j < num_samples else j - num_samples
                else:
                    j = (place * num_samples) >> 20
                _exchange(i, j, limit, weight, slot, load, num_images, max_lag, max_tokens, ceiling)
            elif kind < moves or max_lag == 0:
                k = (place * num_bins) >> 20
                lag = (second >> 10) & max_lag
                if i >= num_images:
                    _move(i, -1, k, limit, weight, slot, load, max_tokens, ceiling)
                else:
                    _move(
                        i,
                        k,
                        min(k + lag, num_bins - 1),
                        limit,
                        weight,
                        slot,
                        load,
                        max_tokens,
                        ceiling,
                    )
            elif i < num_images:
                k = slot[2 * i + ENCODER]
                j = 2 * k + 1 - slot[2 * i + LLM]
                if j < num_bins:
                    _move(i, k, j, limit, weight, slot, load, max_tokens, ceiling)


@_jit
def _exchange(
    i: int,
    j: int,
    limit: int,
    weight: Numbers,
    slot: Numbers,
    load: Numbers,
    num_images: int,
    max_lag: int,
    max_tokens: int,
    ceiling: int,
) -> None:
    """Exchange the places of two samples if the squared loads rise by at most 2 * limit."""
    a, b = slot[2 * i + ENCODER], slot[2 * j + ENCODER]
    p, q = slot[2 * i + LLM], slot[2 * j + LLM]
    if i >= num_images or j >= num_images:
        # A text-only sample has no encoder place: only the LLM places are exchanged, if the
        # other sample may be decoded there.
        if i < num_images and (q < a or q > a + max_lag):
            return
        if j < num_images and (p < b or p > b + max_lag):
            return
        b = a
    d = 0
    rise = 0
    if a != b:
        d = weight[3 * j + ENCODER] - weight[3 * i + ENCODER]
        rise = d * (load[4 * a + ENCODER] - load[4 * b + ENCODER] + d)
    f = 0
    if p != q:
        f = weight[3 * j + LLM] - weight[3 * i + LLM]
        rise += f * (load[4 * p + LLM] - load[4 * q + LLM] + f)
    if rise > limit:
        return
    if ceiling > 0 and not _below_ceiling(a, b, d, p, q, f, load, ceiling):
        return
    if max_tokens > 0:
        t = weight[3 * j + TOKENS] - weight[3 * i + TOKENS]
        if not _fits(a, b, t, load, TOKENS, max_tokens) or not _fits(
            p, q, t, load, LLM_TOKENS, max_tokens
        ):
            return
        _shift(a, b, t, load, TOKENS)
        _shift(p, q, t, load, LLM_TOKENS)
    if a != b:
        _shift(a, b, d, load, ENCODER)
        slot[2 * i + ENCODER], slot[2 * j + ENCODER] = b, a
    _shift(p, q, f, load, LLM)
    slot[2 * i + LLM], slot[2 * j + LLM] = q, p


@_jit
def _move(
    i: int,
    k: int,
    j: int,
    limit: int,
    weight: Numbers,
    slot: Numbers,
    load: Numbers,
    max_tokens: int,
    ceiling: int,
) -> None:
    """Move a sample to encoder microbatch ``k`` and LLM microbatch ``j`` by the same rule."""
    a, p = slot[2 * i + ENCODER], slot[2 * i + LLM]
    d = 0
    rise = 0
    if a != k:
        d = -weight[3 * i + ENCODER]
        rise = d * (load[4 * a + ENCODER] - load[4 * k + ENCODER] + d)
    f = 0
    if p != j:
        f = -weight[3 * i + LLM]
        rise += f * (load[4 * p + LLM] - load[4 * j + LLM] + f)
    if rise > limit:
        return
    if ceiling > 0 and not _below_ceiling(a, k, d, p, j, f, load, ceiling):
        return
    if max_tokens > 0:
        t = -weight[3 * i + TOKENS]
        if not _fits(a, k, t, load, TOKENS, max_tokens) or not _fits(
            p, j, t, load, LLM_TOKENS, max_tokens
        ):
            return
        _shift(a, k, t, load, TOKENS)
        _shift(p, j, t, load, LLM_TOKENS)
    if a != k:
        _shift(a, k, d, load, ENCODER)
        slot[2 * i + ENCODER] = k
    if p != j:
        _shift(p, j, f, load, LLM)
        slot[2 * i + LLM] = j


@_jit
def _shift(a: int, b: int, amount: int, load: Numbers, kind: int) -> None:
    """Take ``amount`` of a kind of load from microbatch ``b`` to ``a``."""
    if a != b:
        load[4 * a + kind] += amount
        load[4 * b + kind] -= amount


@_jit
def _fits(a: int, b: int, t: int, load: Numbers, kind: int, max_tokens: int) -> bool:
    """Whether ``t`` tokens may go from microbatch ``b`` to ``a``."""
    if a == b:
        return True
    return load[4 * a + kind] + t <= max_tokens and load[4 * b + kind] - t <= max_tokens


@_jit
def _below_ceiling(
    a: int, b: int, d: int, p: int, q: int, f: int, load: Numbers, ceiling: int
) -> bool:
    """Whether encoder plus LLM load stay below the ceiling in all touched microbatches."""
    for k in (a, b, p, q):
        if k >= 0:
            total = load[4 * k + ENCODER] + load[4 * k + LLM]
            if a != b:
                total += d * ((k == a) - (k == b))
            if p != q:
                total += f * ((k == p) - (k == q))
            if total > ceiling:
                return False
    return True


IS_COMPILED = hasattr(anneal, "py_func")
"""Whether numba is at work."""


def as_numbers(values: Sequence[int]) -> Any:
    """Integers in the form the kernel runs fastest on: an int64 array, or a list if interpreted."""
    return np.array(values, dtype=np.int64) if IS_COMPILED else list(values)


def interleaved(rows: Sequence[Sequence[int]]) -> Any:
    """The first numbers of all rows, then the second ones and so on, as :func:`as_numbers`."""
    return as_numbers([value for column in zip(*rows, strict=True) for value in column])
