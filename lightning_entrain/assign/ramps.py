"""Load profiles with lighter first and last microbatches, which shorten pipeline fill and drain."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from lightning_entrain.errors import ConfigError


def trapezoid(num_microbatches: int, *, edge: float = 0.25, width: int = 4) -> tuple[float, ...]:
    """Rise linearly from ``edge`` to 1 over ``width`` microbatches, and fall likewise at the end.

    Args:
        num_microbatches: Length of the profile.
        edge: Relative load of the first and the last microbatch.
        width: Microbatches on each side that are lighter than the middle.

    Raises:
        ConfigError: If an argument is out of range.
    """
    if num_microbatches < 1 or width < 0 or not 0 < edge <= 1:
        raise ConfigError(
            f"A ramp of {num_microbatches} microbatches has edge {edge} and width {width}",
            limit="num_microbatches >= 1, 0 < edge <= 1, width >= 0",
        )
    profile = []
    for k in range(num_microbatches):
        distance = min(k, num_microbatches - 1 - k)
        share = 1.0 if distance >= width else distance / width
        profile.append(edge + (1 - edge) * share)
    return tuple(profile)


def resample(profile: Sequence[float], num_microbatches: int) -> tuple[float, ...]:
    """Stretch a profile to another number of microbatches, linearly between its entries."""
    if len(profile) == num_microbatches:
        return tuple(profile)
    if num_microbatches == 1:
        return (1.0,)
    stretched = []
    for k in range(num_microbatches):
        position = Fraction(k * (len(profile) - 1), num_microbatches - 1)
        low = int(position)
        high = min(low + 1, len(profile) - 1)
        share = position - low
        value = (1 - share) * Fraction(profile[low]) + share * Fraction(profile[high])
        stretched.append(float(value))
    return tuple(stretched)
