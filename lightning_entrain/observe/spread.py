"""How unevenly work is spread over microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_entrain.assign.types import Assignment
from lightning_entrain.workload.sizes import SampleSize


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


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoads:
    """Tokens per microbatch of one global batch, all replicas one after the other.

    Attributes:
        encoder: Patches per encoder microbatch (the encoder's tokens, before merging).
        llm: Merged vision and text tokens per LLM microbatch.
    """

    encoder: tuple[int, ...]
    llm: tuple[int, ...]


def microbatch_loads(assignment: Assignment, sizes: Sequence[SampleSize]) -> MicrobatchLoads:
    """Tokens that each microbatch of an assignment holds.

    Args:
        assignment: Where each sample of the global batch goes.
        sizes: The samples' sizes by global-batch index.
    """
    replicas = assignment.replicas
    return MicrobatchLoads(
        encoder=tuple(
            sum(sizes[i].num_patches for i in entry) for r in replicas for entry in r.encoder
        ),
        llm=tuple(sum(sizes[i].num_tokens for i in entry) for r in replicas for entry in r.llm),
    )
