"""Ramps: lighter first microbatches, which shorten the time until the last stage has work."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.tables import TIME_UNITS
from lightning_entrain.schedule.zero_bubble import Knobs

Ints = NDArray[np.int64]


def tune_ramp(
    stage_ms: Sequence[float],
    num_microbatches: int,
    *,
    max_live: float,
    overhead_ms: float = 0.0,
    input_factor: float = 1.0,
    weight_factor: float = 1.0,
    lightest: float = 0.25,
    heaviest: float = 1.15,
    num_steps: int = 20_000,
    seed: int = 0,
) -> tuple[tuple[float, ...], Knobs]:
    """Load per microbatch with which zero bubble runs fastest: lighter ones shorten the fill.

    Computed once per plan; samples are then assigned to it (``assign_samples(ramp=...)``).

    Args:
        stage_ms: Forward time of the mean microbatch on each stage, one stage per rank.
        num_microbatches: Length of the profile.
        max_live: Memory of a rank in mean microbatches.
        overhead_ms: Added to every action.
        input_factor: Time of I over that of F.
        weight_factor: Time of W over that of F.
        lightest: Least load, relative to the mean.
        heaviest: Greatest load.
        num_steps: Profiles to try; one takes about 20 us for 8 stages and 32 microbatches.
        seed: Of the search.

    Returns:
        Relative loads with mean 1, and the knobs tuned for them.

    Raises:
        ScheduleError: If the memory does not suffice for any order.
    """
    from lightning_entrain.schedule import ramp_kernel, zb_kernel

    num_stages = len(stage_ms)
    start = Knobs.zb_h1(num_stages)
    warmup = np.array(start.warmup, dtype=np.int64)
    delay = np.array(start.weight_delay, dtype=np.int64)
    profile = linear_ramp(num_microbatches, num_stages, lightest, heaviest)
    scale = TIME_UNITS / max(math.fsum(stage_ms) / num_stages, 1e-300) / 1024
    makespan = ramp_kernel.climb_profile(
        profile,
        np.round(np.asarray(stage_ms) * scale).astype(np.int64),
        np.full(num_stages, int(max_live * 1024), dtype=np.int64),
        round(overhead_ms * scale * 1024),
        np.array([round(1000 * input_factor), round(1000 * weight_factor)], dtype=np.int64),
        int(lightest * 1024),
        int(heaviest * 1024),
        warmup,
        delay,
        num_steps,
        seed + 1,
    )
    if makespan == zb_kernel.STUCK:
        raise ScheduleError(
            f"No zero-bubble order fits into {max_live} microbatches per rank",
            limit="at least one",
            remedy="raise the memory budget",
        )
    knobs = Knobs(warmup=tuple(warmup.tolist()), weight_delay=tuple(delay.tolist()))
    return tuple((profile / 1024).tolist()), knobs


def linear_ramp(num: int, num_stages: int, lightest: float, heaviest: float) -> Ints:
    """Rise over the first microbatches as far as the bounds and the mean allow; integers."""
    width = min(num_stages, num)
    top = min(heaviest, 1.12)
    edge = max(lightest, 0.4)
    shape = np.minimum(edge + (top - edge) * np.arange(num) / width, top)
    profile: Ints = np.floor(shape / (math.fsum(shape) / num) * 1024).astype(np.int64)
    low, high = int(lightest * 1024), int(heaviest * 1024)
    if profile.min() < low or profile.max() > high - 1:
        profile = np.full(num, 1024, dtype=np.int64)
    profile[: num * 1024 - int(profile.sum())] += 1
    return profile
