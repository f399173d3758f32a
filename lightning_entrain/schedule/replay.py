"""The simulator's inner loop, compiled by numba where it is installed.

Importing this module imports numba, so it is imported only when a simulation runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError:  # Slower, same result.
    njit = None

_Function = TypeVar("_Function", bound=Callable[..., Any])
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def jit(function: _Function) -> _Function:
    """Compile a function on its first call and keep the machine code on disk."""
    return function if njit is None else njit(cache=True, nogil=True)(function)


FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Codes of F, B, I and W."""


@jit
def arrival_of(
    kind: int,
    s: int,
    m: int,
    t: int,
    num_encoder: int,
    has_segment: NDArray[np.bool_],
    activation: Floats,
    gradient: Floats,
) -> float:
    """When the last input of an action is there; infinite if it is not yet made."""
    whole = has_segment.shape[1]
    last = activation.shape[0] - 1
    ready = 0.0
    if kind == FORWARD:
        if s == num_encoder:
            for lag in range(whole):
                if m >= lag and has_segment[m - lag, lag]:
                    ready = max(ready, activation[s, m - lag, lag])
        elif s > 0:
            ready = activation[s, m, whole]
    elif kind != WEIGHT and s < last:
        if s == num_encoder - 1 and t < 0:
            for lag in range(whole):
                if has_segment[m, lag]:
                    ready = max(ready, gradient[s, m, lag])
        else:
            ready = gradient[s, m, whole if t < 0 else t - m]
    return ready


@jit
def deliver(
    source: int,
    dest: int,
    k: int,
    slot: int,
    now: float,
    rank_of: Ints,
    transfer_ms: Floats,
    link_free: Floats,
    made: Floats,
) -> None:
    """Send a tensor when it is made: it follows the one before on the same link."""
    a, b = rank_of[source], rank_of[dest]
    arrival = now
    if a != b:
        arrival = max(now, link_free[a, b]) + transfer_ms[source, k, slot]
        link_free[a, b] = arrival
    made[dest, k, slot] = arrival


@jit
def replay(
    offsets: Ints,
    stage: Ints,
    kind: Ints,
    microbatch: Ints,
    target: Ints,
    duration: Floats,
    num_encoder: int,
    rank_of: Ints,
    has_segment: NDArray[np.bool_],
    forward_ms: Floats,
    backward_ms: Floats,
    start: Floats,
    end: Floats,
) -> int:
    """Start and end of every action when each starts as soon as it can, in its rank's order.

    Args:
        offsets: First action of each rank, and one past the last, ``[ranks + 1]``.
        stage: Per action.
        kind: Per action.
        microbatch: Per action.
        target: Per action; -1 for whole microbatches.
        duration: Per action.
        num_encoder: Encoder stages.
        rank_of: Rank per stage.
        has_segment: ``[microbatches, lags]``: whether segment (k, k + lag) has rows.
        forward_ms: Transfer time of a stage's output, ``[stages, microbatches, lags + 1]``; the
            last column is for whole microbatches. 0 inside a rank.
        backward_ms: Likewise for gradients that a stage sends to the one before it.
        start: Filled, per action.
        end: Filled, per action.

    Returns:
        Number of actions that ran; fewer than all if the lists wait for each other. Transfers from
        one rank to another follow each other; they overlap with compute.
    """
    num_ranks = len(offsets) - 1
    num_stages = len(rank_of)
    whole = has_segment.shape[1]
    activation = np.full((num_stages, has_segment.shape[0], whole + 1), np.inf)
    gradient = np.full((num_stages, has_segment.shape[0], whole + 1), np.inf)
    link_free = np.zeros((num_ranks, num_ranks))
    free = np.zeros(num_ranks)
    place = offsets[:-1].copy()
    num_done = 0
    moved = True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while place[rank] < offsets[rank + 1]:
                a = place[rank]
                s, m, t = stage[a], microbatch[a], target[a]
                ready = arrival_of(kind[a], s, m, t, num_encoder, has_segment, activation, gradient)
                if ready == np.inf:
                    break
                start[a] = max(ready, free[rank])
                now = start[a] + duration[a]
                end[a] = now
                free[rank] = now
                place[rank] += 1
                num_done += 1
                moved = True
                if kind[a] == FORWARD and s < num_stages - 1:
                    for slot in range(whole + 1):
                        if s == num_encoder - 1:
                            wanted = slot < whole and has_segment[m, slot]
                        else:
                            wanted = slot == whole
                        if wanted:
                            deliver(
                                s, s + 1, m, slot, now, rank_of, forward_ms, link_free, activation
                            )
                elif (kind[a] == BACKWARD or kind[a] == INPUT) and s > 0:
                    for lag in range(whole + 1):
                        k, slot = m, lag
                        if s == num_encoder:
                            k = m - lag
                            wanted = lag < whole and k >= 0 and has_segment[k, lag]
                        else:
                            wanted = slot == (whole if t < 0 else t - m)
                        if wanted:
                            deliver(
                                s, s - 1, k, slot, now, rank_of, backward_ms, link_free, gradient
                            )
    return num_done


@jit
def peaks(
    offsets: Ints,
    stage: Ints,
    kind: Ints,
    microbatch: Ints,
    target: Ints,
    share: Floats,
    activation_bytes: Floats,
    num_forward_only: int,
    peak_live: Ints,
    peak_bytes: Floats,
) -> None:
    """Peak live microbatches per stage and peak activation bytes per rank, from the order alone.

    Args:
        offsets: As for :func:`replay`; so are the per-action arrays.
        stage: Per action.
        kind: Per action.
        microbatch: Per action.
        target: Per action.
        share: Part of its microbatch's activations that each action ends the life of.
        activation_bytes: ``[stages, microbatches]``.
        num_forward_only: On the stages before this one nothing outlives its forward.
        peak_live: Filled, ``[stages]``.
        peak_bytes: Filled, ``[ranks]``.
    """
    shape = activation_bytes.shape
    left = np.zeros(shape)
    live = np.zeros(shape[0], dtype=np.int64)
    is_split = np.zeros(shape, dtype=np.bool_)
    for a in range(len(stage)):
        if kind[a] == WEIGHT:
            is_split[stage[a], microbatch[a]] = True
    for rank in range(len(offsets) - 1):
        held = 0.0
        for a in range(offsets[rank], offsets[rank + 1]):
            s, m = stage[a], microbatch[a]
            if kind[a] == FORWARD:
                live[s] += 1
                held += activation_bytes[s, m]
                left[s, m] = 1.0
                peak_live[s] = max(peak_live[s], live[s])
                peak_bytes[rank] = max(peak_bytes[rank], held)
                if s < num_forward_only:
                    live[s] -= 1
                    held -= activation_bytes[s, m]
            elif kind[a] == WEIGHT or (kind[a] == BACKWARD and not is_split[s, m]):
                left[s, m] -= share[a]
                held -= share[a] * activation_bytes[s, m]
                if left[s, m] < 1e-9:
                    left[s, m] = 1.0
                    live[s] -= 1
