"""Repeated timing of one call, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_entrain.profile_estimate import LEAST_REPETITIONS, MOST_REPETITIONS

Clock = Callable[[], float]


def time_call(
    run: Callable[[], Tensor],
    seconds: float,
    place: torch.device,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Milliseconds of forward and backward, repeated for about ``seconds`` after a warm-up.

    Args:
        run: Forward.
        seconds: Time to spend; at least 3 and at most 50 repetitions.
        place: Device, to wait for.
        clock: See :func:`lightning_entrain.profiling.profile_model`.
    """
    forward: list[float] = []
    backward: list[float] = []
    _once(run, place, clock)
    end = time.perf_counter() + seconds
    while len(forward) < LEAST_REPETITIONS or (
        time.perf_counter() < end and len(forward) < MOST_REPETITIONS
    ):
        times = _once(run, place, clock)
        forward.append(times[0])
        backward.append(times[1])
    return forward, backward


def _once(run: Callable[[], Tensor], place: torch.device, clock: Clock) -> tuple[float, float]:
    start = _now(place, clock)
    output = run()
    middle = _now(place, clock)
    gradient = torch.ones_like(output)
    before = _now(place, clock)
    output.backward(gradient)
    return (middle - start) * 1e3, (_now(place, clock) - before) * 1e3


def _now(place: torch.device, clock: Clock) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return clock()


def spread(times: Sequence[float]) -> float:
    """Distance of the quartiles over the median."""
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float((high - low) / middle)
