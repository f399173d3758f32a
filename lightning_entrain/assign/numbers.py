"""Exact numbers: integer costs, compensated sums and seeds that are equal on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

UNIT_BITS = 20
"""Costs are rounded to units between 2^-20 and 2^-21 of their mean."""

_MASK = (1 << 64) - 1


def integer_units(costs: Sequence[float]) -> list[int]:
    """Round costs to integers with one power-of-two unit for all.

    A power of two as the unit keeps small whole numbers exact, and makes the result independent of
    the scale by powers of two. The mean becomes at least 2^20 and less than 2^21.

    Args:
        costs: Finite, non-negative numbers in any unit.
    """
    largest = max(costs, default=0.0)
    if largest == 0:
        return [0] * len(costs)
    # Scaled into [0, 1) first: the sum can then neither overflow nor lose bits to subnormals.
    shift = -math.frexp(largest)[1]
    scaled = [math.ldexp(cost, shift) for cost in costs]
    exponent = math.frexp(math.fsum(scaled) / len(scaled))[1]
    return [round(math.ldexp(cost, UNIT_BITS + 1 - exponent)) for cost in scaled]


def loads_of(costs: Sequence[float], microbatches: Iterable[Sequence[int]]) -> list[float]:
    """Sum of the costs of each microbatch's samples, correctly rounded whatever their order."""
    return [math.fsum(costs[i] for i in entry) for entry in microbatches]


def mix(*parts: int) -> int:
    """Hash integers to 64 bits (splitmix64), so that nearby seeds give unrelated streams."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
