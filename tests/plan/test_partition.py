"""Layer partition and proportional allocation."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.plan.partition import partition_layers, proportional_split, stage_costs


def brute_force(costs: list[float], num_stages: int) -> float:
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts
    )


@pytest.mark.parametrize("seed", range(300))
def test_equals_brute_force(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_layers = int(generator.integers(1, 12))
    num_stages = int(generator.integers(1, num_layers + 1))
    kinds = (
        generator.random(num_layers),
        generator.integers(0, 4, num_layers).astype(float),
        generator.lognormal(0, 2, num_layers),
    )
    costs = list(kinds[seed % 3])
    stages = partition_layers(costs, num_stages)
    assert len(stages) == num_stages
    assert [start for start, _ in stages] == [0, *(stop for _, stop in stages[:-1])]
    assert stages[-1][1] == num_layers
    assert all(stop > start for start, stop in stages)
    assert max(stage_costs(costs, stages)) == pytest.approx(brute_force(costs, num_stages))


def test_heavy_head_stands_alone_and_spare_layers_go_first() -> None:
    assert partition_layers([1, 1, 1, 1, 4], 2) == ((0, 4), (4, 5))
    assert partition_layers([1] * 10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))


def test_lighter_stages_are_even_too() -> None:
    assert stage_costs([9, 1, 1, 1, 1], partition_layers([9, 1, 1, 1, 1], 3)) == (9, 2, 2)


def test_200_layers_into_32_stages_in_50_ms() -> None:
    costs = np.random.default_rng(0).random(200)
    partition_layers(costs, 32)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        partition_layers(costs, 32)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], []])
def test_bad_costs(bad: list[float]) -> None:
    with pytest.raises(ConfigError):
        partition_layers(bad, 1)
    with pytest.raises(ConfigError):
        proportional_split(bad, 4)


def test_more_stages_than_layers() -> None:
    with pytest.raises(InfeasiblePlanError, match="3 stages for 2 layers"):
        partition_layers([1, 1], 3)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(lambda w: sum(w) > 1e-3),
    st.integers(5, 64),
)
@settings(max_examples=200, deadline=None)
def test_split_is_nearest_among_all(weights: list[float], total: int) -> None:
    shares = proportional_split(weights, total)
    assert sum(shares) == total
    assert min(shares) >= 1
    if len(weights) == 2:
        exact = weights[0] / sum(weights) * total
        best = min(abs(exact - a) for a in range(1, total))
        assert abs(exact - shares[0]) == pytest.approx(best, abs=1e-9)


def test_split_rounds_and_keeps_one() -> None:
    assert proportional_split([10.4, 5.6], 16) == (10, 6)
    assert proportional_split([1, 1e9], 4) == (1, 3)
    assert proportional_split([0, 5], 4) == (1, 3)
    assert proportional_split([10.5, 5.5], 16) == (11, 5)  # the boundary: earlier module


def test_split_refuses_too_few_gpus_and_no_work() -> None:
    with pytest.raises(InfeasiblePlanError, match="1 GPUs for 2 modules"):
        proportional_split([1, 1], 1)
    with pytest.raises(ConfigError, match="are 0"):
        proportional_split([0, 0], 4)
