"""How unevenly work is spread over microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and spread of a set of loads; two of them merge into that of the union.

    Attributes:
        count: Number of loads, at least 0.
        mean: Their mean; 0 without loads.
        squares: Sum of squared deviations from the mean.
        smallest: Least load; infinity without loads.
        largest: Greatest load; minus infinity without loads.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    @classmethod
    def of(cls, loads: Iterable[float]) -> Spread:
        """Spread of a set of loads, any unit.

        Args:
            loads: One number per microbatch; an empty microbatch counts as 0.
        """
        values = [float(load) for load in loads]
        if not values:
            return cls()
        mean = math.fsum(values) / len(values)
        return cls(
            count=len(values),
            mean=mean,
            squares=math.fsum((value - mean) ** 2 for value in values),
            smallest=min(values),
            largest=max(values),
        )

    def merge(self, other: Spread) -> Spread:
        """Spread of both sets together, as if computed at once."""
        count = self.count + other.count
        if count == 0:
            return self
        distance = other.mean - self.mean
        return Spread(
            count=count,
            mean=self.mean + distance * other.count / count,
            squares=self.squares + other.squares + distance**2 * self.count * other.count / count,
            smallest=min(self.smallest, other.smallest),
            largest=max(self.largest, other.largest),
        )

    @property
    def std(self) -> float:
        """Population standard deviation, in the unit of the loads; 0 without loads."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation, std / mean, without a unit; 0 where the mean is 0."""
        return self.std / self.mean if self.mean else 0.0

    @property
    def max_over_mean(self) -> float:
        """Heaviest load over the mean, at least 1; 0 where the mean is 0."""
        return self.largest / self.mean if self.mean else 0.0
