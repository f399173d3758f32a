"""Ramps: lighter first microbatches, which shorten the time until the last stage has work."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


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
