"""What no assignment of the same samples to as many microbatches can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_entrain.assign.measures import imbalance


@dataclass(frozen=True, kw_only=True)
class LoadBound:
    """Lower bounds on the loads of one module, and how far a result is from them.

    Attributes:
        mean: Total / number of microbatches: the heaviest is at least this.
        heaviest: Cost of the heaviest sample: likewise.
        parity: From counts: of the j*K + 1 heaviest samples some microbatch holds j + 1.
        max_load: The largest of the three.
        cv: Least possible coefficient of variation given the samples heavier than the mean.
        max_load_found: The result's heaviest load.
        cv_found: The result's coefficient of variation.
    """

    mean: float
    heaviest: float
    parity: float
    max_load: float
    cv: float
    max_load_found: float
    cv_found: float

    @property
    def max_load_gap(self) -> float:
        """Heaviest load above its bound, as a fraction of the bound; 0 where all costs are 0."""
        return self.max_load_found / self.max_load - 1 if self.max_load > 0 else 0.0

    @property
    def cv_gap(self) -> float:
        """Coefficient of variation above its bound."""
        return self.cv_found - self.cv


@dataclass(frozen=True, kw_only=True)
class AssignmentBounds:
    """Bounds beside a result.

    Attributes:
        encoder: Per replica, over its encoder microbatches and the replica's samples.
        llm: Likewise for the LLM.
        encoder_replicas: Over the replicas' total encoder loads and all samples.
        llm_replicas: Likewise for the LLM.
    """

    encoder: tuple[LoadBound, ...]
    llm: tuple[LoadBound, ...]
    encoder_replicas: LoadBound
    llm_replicas: LoadBound


def least_max_load(costs: Sequence[float], num_bins: int) -> float:
    """What the heaviest of so many bins holds at least: `LoadBound.max_load` alone.

    Args:
        costs: Per sample, any order.
        num_bins: Bins that the samples are spread over.
    """
    if not costs or not num_bins:
        return 0.0
    heavy_first = sorted(costs, reverse=True)
    return max(math.fsum(costs) / num_bins, heavy_first[0], _parity(heavy_first, num_bins))


def load_bound(costs: Sequence[float], loads: Sequence[float]) -> LoadBound:
    """Bounds for ``costs`` spread over ``len(loads)`` bins, beside the loads found.

    Args:
        costs: Per sample, any order.
        loads: Per bin.
    """
    heavy_first = sorted(costs, reverse=True)
    num_bins = len(loads)
    mean = math.fsum(costs) / num_bins if num_bins else 0.0
    heaviest = heavy_first[0] if heavy_first else 0.0
    parity = _parity(heavy_first, num_bins)
    found = imbalance(loads)
    return LoadBound(
        mean=mean,
        heaviest=heaviest,
        parity=parity,
        max_load=max(mean, heaviest, parity),
        cv=_least_cv(heavy_first, num_bins, mean),
        max_load_found=max(loads, default=0.0),
        cv_found=found.cv,
    )


def _parity(heavy_first: Sequence[float], num_bins: int) -> float:
    """Largest over j of the sum of the j + 1 lightest among the j*K + 1 heaviest samples."""
    if not num_bins:
        return 0.0
    best = 0.0
    for j in range((len(heavy_first) - 1) // num_bins + 1 if heavy_first else 0):
        last = j * num_bins
        best = max(best, math.fsum(heavy_first[last - j : last + 1]))
    return best


def _least_cv(heavy_first: Sequence[float], num_bins: int, mean: float) -> float:
    """Spread when each sample heavier than what is left for the others has a bin to itself.

    The t heaviest loads of any assignment hold at least the t heaviest samples, so its loads
    majorise this fractional filling, and a sum of squares can only be larger. Where all samples
    with cost weigh the same, loads are multiples of that weight and the bound is exact.
    """
    if mean == 0:
        return 0.0
    rest = math.fsum(heavy_first)
    loads: list[float] = []
    for cost in heavy_first:
        left = num_bins - len(loads)
        if left <= 1 or cost * left <= rest:
            break
        loads.append(cost)
        rest = max(0.0, rest - cost)
    left = num_bins - len(loads)
    filled = imbalance(loads + [rest / left] * left).cv
    weights = [cost for cost in heavy_first if cost > 0]
    if weights[0] == weights[-1]:
        per_bin, longer = divmod(len(weights), num_bins)
        counts = [per_bin + 1.0] * longer + [float(per_bin)] * (num_bins - longer)
        return max(filled, imbalance(counts).cv)
    return filled
