"""How uneven loads are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """Spread of a list of loads, in the unit of the loads where there is one.

    Attributes:
        mean: Mean load.
        std: Standard deviation over the whole list (divided by n).
        cv: Coefficient of variation, std / mean; 0 where all loads are 0.
        max_over_mean: Heaviest load / mean; 1 where all loads are 0.
    """

    mean: float
    std: float
    cv: float
    max_over_mean: float


def imbalance(loads: Sequence[float]) -> Imbalance:
    """Measure a list of loads; an empty list counts as even.

    Args:
        loads: Non-negative, one per microbatch (or per replica).
    """
    largest = max(loads, default=0.0)
    if largest == 0:
        return Imbalance(mean=0.0, std=0.0, cv=0.0, max_over_mean=1.0)
    scaled = [load / largest for load in loads]  # Neither the sum nor the squares can overflow.
    mean = math.fsum(scaled) / len(scaled)
    std = math.sqrt(math.fsum((load - mean) ** 2 for load in scaled) / len(scaled))
    return Imbalance(mean=mean * largest, std=std * largest, cv=std / mean, max_over_mean=1 / mean)


def squared_deviations(encoder_loads: Sequence[float], llm_loads: Sequence[float]) -> float:
    """Sum over both modules and all microbatches of ((load - mean) / mean) squared."""
    return math.fsum(len(loads) * imbalance(loads).cv ** 2 for loads in (encoder_loads, llm_loads))


def peak(encoder_loads: Sequence[float], llm_loads: Sequence[float]) -> float:
    """Largest over k of encoder load / mean + LLM load / mean; a module without load adds 0.

    Args:
        encoder_loads: One per microbatch.
        llm_loads: As many.
    """
    means = [imbalance(loads).mean for loads in (encoder_loads, llm_loads)]
    return max(
        (
            sum(load / mean for load, mean in zip(pair, means, strict=True) if mean > 0)
            for pair in zip(encoder_loads, llm_loads, strict=True)
        ),
        default=0.0,
    )
