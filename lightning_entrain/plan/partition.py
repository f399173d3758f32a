"""Splitting layers into stages and GPUs between modules (Entrain, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ConfigError, InfeasiblePlanError

Costs = Sequence[float] | NDArray[np.float64]

Stages = tuple[tuple[int, int], ...]
"""Layer ranges (start, stop), one per stage, without gaps."""


def partition_layers(costs: Costs, num_stages: int) -> Stages:
    """Consecutive stages with the smallest possible maximum cost.

    Exact dynamic programming (Entrain, section 4.3): ``F(l, p) = min over m of max(F(m, p-1),
    cost of layers m..l)``. Among the optimal partitions the one with the smallest sum of squared
    stage costs is taken, so that lighter stages are even too; remaining ties put layers early.

    Args:
        costs: Cost per layer, at least 0, in any unit. Fold an embedding or a head into the first
            or last layer when it cannot be a stage of its own.
        num_stages: Stages; each gets at least one layer.

    Returns:
        One ``(start, stop)`` per stage.

    Raises:
        ConfigError: If a cost is negative or not a number, or ``num_stages`` is below 1.
        InfeasiblePlanError: If there are fewer layers than stages.
    """
    array = _checked_costs(costs, "cost")
    if num_stages < 1:
        raise ConfigError(f"num_stages is {num_stages}", limit="at least 1")
    if num_stages > len(array):
        raise InfeasiblePlanError(
            f"{num_stages} stages for {len(array)} layers",
            limit="every stage holds at least one layer",
            remedy="use fewer stages, or more tensor parallelism",
        )
    prefix = np.concatenate([[0.0], np.cumsum(array)])
    span = prefix[None, :] - prefix[:, None]  # span[m, l]: cost of layers m..l-1
    span[np.tril_indices(len(prefix))] = np.inf
    peak = _smallest_peak(span, num_stages)
    # A hair above the optimum: sums in another order may differ in the last bit.
    squares = np.where(span <= peak * (1 + 1e-12), span**2, np.inf)
    return _trace_back(squares, num_stages)


def _smallest_peak(span: np.ndarray, num_stages: int) -> float:
    best = span[0]
    for _ in range(num_stages - 1):
        best = np.maximum(best[:, None], span).min(axis=0)
    return float(best[-1])


def _trace_back(squares: np.ndarray, num_stages: int) -> Stages:
    best = squares[0]
    choices = []
    for _ in range(num_stages - 1):
        totals = best[:, None] + squares
        # The last minimum: earlier stages take the spare layers.
        choice = len(best) - 1 - totals[::-1].argmin(axis=0)
        best = totals[choice, np.arange(len(best))]
        choices.append(choice)
    stops = [len(squares) - 1]
    for choice in reversed(choices):
        stops.append(int(choice[stops[-1]]))
    bounds = [0, *reversed(stops)]
    return tuple(pairwise(bounds))


def stage_costs(costs: Costs, stages: Stages) -> tuple[float, ...]:
    """Cost of each stage, in the unit of ``costs``."""
    return tuple(math.fsum(costs[start:stop]) for start, stop in stages)


def proportional_split(weights: Costs, total: int) -> tuple[int, ...]:
    """Share ``total`` units in proportion to ``weights``, in whole units, each at least 1.

    The result has the smallest sum of squared distances to the exact shares (largest remainders;
    what the minimum of 1 takes is taken from the largest surplus). Two modules get the rounded
    share, as in the paper's Tables 2 and 5-11; an exact half goes to the earlier module.

    Args:
        weights: Work per module, at least 0, not all 0.
        total: Units (GPUs, stages) to share.

    Raises:
        ConfigError: If a weight is negative or not a number, or all are 0.
        InfeasiblePlanError: If there are fewer units than modules.
    """
    array = _checked_costs(weights, "weight")
    if total < len(array):
        raise InfeasiblePlanError(
            f"{total} GPUs for {len(array)} modules",
            limit="each module holds at least one GPU",
            remedy="use more GPUs per replica, fewer replicas, or let modules share ranks",
        )
    if not array.sum() > 0:
        raise ConfigError("All modules' workloads are 0", limit="some work to share the GPUs by")
    exact = array / array.sum() * total
    shares = np.maximum(1, np.floor(exact)).astype(int)
    while shares.sum() < total:
        shares[np.argmax(np.round(exact - shares, 12))] += 1
    while shares.sum() > total:
        surplus = np.where(shares > 1, shares - exact, -np.inf)
        shares[np.argmax(np.round(surplus, 12))] -= 1
    return tuple(int(share) for share in shares)


def _checked_costs(values: Costs, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"No {name}s given", limit="at least one")
    broken = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if broken.size:
        index = int(broken[0])
        raise ConfigError(f"{name} {index} is {array[index]}", limit="a finite number, at least 0")
    return array
