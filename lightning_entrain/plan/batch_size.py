"""The smallest stable profiling batch, b_min (Entrain, section 4.2, Algorithm 1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.partition import proportional_split

FloatArray = NDArray[np.float64]
Allocation = tuple[int, ...]
"""GPUs per module."""


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """An allocation that drawn batches asked for.

    Attributes:
        allocation: GPUs per module.
        frequency: Share of the drawn batches that asked for it.
        relative_time: Work of the busiest GPU over the whole data, relative to a perfect split.
    """

    allocation: Allocation
    frequency: float
    relative_time: float


@dataclass(frozen=True, kw_only=True)
class BMin:
    """Result of the search for b_min.

    Attributes:
        b_min: Smallest batch size whose allocation was stable, or the cap.
        stable: Whether one allocation came out at ``b_min``.
        allocation: GPUs per module at ``b_min``: the most frequent one.
        competitors: All allocations seen at ``b_min``, most frequent first.
        rounds: Per batch size tried, how often each allocation came out.
        proportions: Each module's share of the work of the whole data.
        interval: 95 % bootstrap interval of the first module's share in a batch of ``b_min``.
        num_gpus: GPUs that were shared.
    """

    b_min: int
    stable: bool
    allocation: Allocation
    competitors: tuple[Competitor, ...]
    rounds: dict[int, dict[Allocation, int]]
    proportions: tuple[float, ...]
    interval: tuple[float, float]
    num_gpus: int


def num_trials(alpha: float = 0.05, p_error: float = 0.05) -> int:
    """Batches that must agree to call a batch size stable: 59 for 0.05 and 0.05.

    If the true chance of another allocation is ``p_error`` or more, all of them agreeing has a
    chance of at most ``alpha``.
    """
    for name, value in (("alpha", alpha), ("p_error", p_error)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} is {value}", limit="between 0 and 1")
    return math.ceil(math.log(alpha) / math.log1p(-p_error))


def find_b_min(
    work: FloatArray,
    num_gpus: int,
    *,
    alpha: float = 0.05,
    p_error: float = 0.05,
    seed: int = 0,
    max_batch: int = 8192,
) -> BMin:
    """Algorithm 1 with three changes.

    The test is repeated for doubled batch sizes, so ``alpha`` is spent over the rounds
    (alpha/2, alpha/4, ...) and the stated confidence holds for the whole search. A share on a
    rounding boundary never becomes stable: the search ends at ``max_batch`` and reports the
    competing allocations with their times. The shares of the whole data are reported beside it.

    Args:
        work: Predicted time per sample and module, ``[num_samples, num_modules]``.
        num_gpus: GPUs of one replica to share between the modules.
        alpha: Chance of calling an unstable batch size stable.
        p_error: Rate of other allocations that counts as unstable.
        seed: Seed of the drawn batches.
        max_batch: Largest batch size tried.

    Raises:
        ConfigError: If work is negative, not finite, empty or all 0.
        InfeasiblePlanError: If there are fewer GPUs than modules.
    """
    num_trials(alpha, p_error)
    if max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch}", limit="at least 1")
    table = _checked_work(work)
    proportional_split(table.sum(axis=0), num_gpus)  # refuses impossible input up front
    generator = np.random.default_rng(seed)
    rounds: dict[int, dict[Allocation, int]] = {}
    size, spent, stable = 1, alpha, False
    while True:
        spent /= 2
        seen = draw_allocations(table, num_gpus, size, 1 + num_trials(spent, p_error), generator)
        rounds[size] = dict(seen.most_common())
        stable = len(seen) == 1
        if stable or size * 2 > max_batch:
            break
        size *= 2
    competitors = _competitors(rounds[size], table, num_gpus)
    return BMin(
        b_min=size,
        stable=stable,
        allocation=competitors[0].allocation,
        competitors=competitors,
        rounds=rounds,
        proportions=tuple(float(x) for x in table.sum(axis=0) / table.sum()),
        interval=_share_interval(table, size, generator),
        num_gpus=num_gpus,
    )


def allocation_trials(
    work: FloatArray,
    num_gpus: int,
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),
    *,
    trials: int | None = None,
    seed: int = 0,
) -> dict[int, dict[Allocation, int]]:
    """How often each allocation comes out per batch size (the paper's Tables 2 and 5-11).

    Args:
        work: Predicted time per sample and module, ``[num_samples, num_modules]``.
        num_gpus: GPUs of one replica.
        batch_sizes: Sizes to draw.
        trials: Batches per size; None for the 59 of Algorithm 1.
        seed: Seed of the drawn batches.

    Returns:
        Per batch size, counts by allocation, most frequent first.
    """
    table = _checked_work(work)
    generator = np.random.default_rng(seed)
    count = num_trials() if trials is None else trials
    return {
        size: dict(draw_allocations(table, num_gpus, size, count, generator).most_common())
        for size in batch_sizes
    }


def draw_allocations(
    work: FloatArray, num_gpus: int, size: int, count: int, generator: np.random.Generator
) -> Counter[Allocation]:
    """Allocations that ``count`` random batches of ``size`` samples ask for.

    Shares are ratios of sums over a batch, not means of ratios: those have another limit.
    """
    seen: Counter[Allocation] = Counter()
    for _ in range(count):
        total = work[generator.integers(0, len(work), size=size)].sum(axis=0)
        if total.sum() > 0:
            seen[proportional_split(total, num_gpus)] += 1
    return seen


def split_names(trials: dict[int, dict[Allocation, int]]) -> dict[int, tuple[str, ...]]:
    """Allocations as ``"encoder:llm"`` per batch size, more encoder GPUs first."""
    return {
        size: tuple(":".join(map(str, allocation)) for allocation in sorted(seen, reverse=True))
        for size, seen in trials.items()
    }


def relative_time(work: FloatArray, allocation: Allocation) -> float:
    """Work per GPU of the busiest module, relative to a perfect split of the same GPUs."""
    totals = work.sum(axis=0)
    busiest = max(total / gpus for total, gpus in zip(totals, allocation, strict=True))
    return float(busiest * sum(allocation) / totals.sum())


def _competitors(
    seen: dict[Allocation, int], work: FloatArray, num_gpus: int
) -> tuple[Competitor, ...]:
    total = sum(seen.values())
    if not total:  # every drawn batch was empty: fall back to the whole data
        seen, total = {proportional_split(work.sum(axis=0), num_gpus): 1}, 1
    return tuple(
        Competitor(
            allocation=allocation,
            frequency=count / total,
            relative_time=relative_time(work, allocation),
        )
        for allocation, count in seen.items()
    )


def _share_interval(
    work: FloatArray, size: int, generator: np.random.Generator, draws: int = 400
) -> tuple[float, float]:
    shares = []
    for _ in range(draws):
        total = work[generator.integers(0, len(work), size=size)].sum(axis=0)
        if total.sum() > 0:
            shares.append(total[0] / total.sum())
    if not shares:
        return 0.0, 1.0
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def _checked_work(work: FloatArray) -> FloatArray:
    table = np.asarray(work, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ConfigError(
            f"The workload table has shape {list(table.shape)}",
            limit="[num_samples, num_modules] with at least one sample",
        )
    broken = np.argwhere(~np.isfinite(table) | (table < 0))
    if broken.size:
        row, column = broken[0]
        raise ConfigError(
            f"The workload of sample {row} in module {column} is {table[row, column]}",
            limit="a finite number, at least 0",
        )
    return table
