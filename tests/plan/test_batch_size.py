"""b_min by Algorithm 1 and its improvements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.plan.batch_size import (
    allocation_trials,
    find_b_min,
    num_trials,
    relative_time,
    split_names,
)


def noisy(share: float, spread: float, count: int = 4000) -> np.ndarray:
    generator = np.random.default_rng(1)
    first = share * generator.lognormal(0, spread, count)
    second = (1 - share) * generator.lognormal(0, spread, count)
    return np.stack([first, second], axis=1)


def test_number_of_trials_is_the_papers() -> None:
    assert num_trials(0.05, 0.05) == 59
    assert num_trials(0.01, 0.05) == 90


def test_equal_samples_are_stable_at_once() -> None:
    result = find_b_min(np.tile([3.0, 1.0], (50, 1)), 16)
    assert (result.b_min, result.stable, result.allocation) == (1, True, (12, 4))
    assert result.proportions == (0.75, 0.25)


def test_one_sample_is_enough() -> None:
    assert find_b_min(np.array([[1.0, 1.0]]), 8).allocation == (4, 4)


def test_more_spread_needs_larger_batches() -> None:
    sizes = [find_b_min(noisy(0.5, spread), 16).b_min for spread in (0.01, 0.3, 1.0)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_stable_batches_agree_in_fresh_draws() -> None:
    work = noisy(0.5, 0.6)
    result = find_b_min(work, 16, seed=3)
    assert result.stable
    seen = allocation_trials(work, 16, (result.b_min,), trials=2000, seed=9)[result.b_min]
    assert seen[result.allocation] / 2000 > 0.95


def test_alpha_is_spent_over_the_rounds() -> None:
    result = find_b_min(noisy(0.5, 0.6), 16)
    draws = [sum(seen.values()) for seen in result.rounds.values()]
    # alpha/2, alpha/4, ...: each round adds ln 2 / -ln 0.95 = 13.5 batches.
    assert draws[0] == 1 + num_trials(0.025, 0.05)
    assert all(12 <= b - a <= 15 for a, b in itertools.pairwise(draws))


def test_a_share_on_the_boundary_ends_and_names_both() -> None:
    mean = 10.5 / 16
    work = noisy(0.5, 0.5)
    work /= work.mean(axis=0)
    work *= [mean, 1 - mean]
    result = find_b_min(work, 16, max_batch=512)
    assert not result.stable
    assert result.b_min == 512
    assert {item.allocation for item in result.competitors} == {(10, 6), (11, 5)}
    assert sum(item.frequency for item in result.competitors) == pytest.approx(1)
    assert all(1.0 <= item.relative_time < 1.15 for item in result.competitors)


def test_interval_covers_the_datas_own_share() -> None:
    result = find_b_min(noisy(0.7, 0.5), 16)
    low, high = result.interval
    assert low < result.proportions[0] < high


def test_relative_time() -> None:
    work = np.array([[3.0, 1.0]])
    assert relative_time(work, (3, 1)) == pytest.approx(1.0)
    assert relative_time(work, (2, 2)) == pytest.approx(1.5)


def test_table_narrows_with_the_batch_size() -> None:
    trials = allocation_trials(noisy(0.5, 0.3), 16)
    counts = [len(seen) for seen in trials.values()]
    assert list(trials) == [1, 4, 16, 64, 256]
    assert counts == sorted(counts, reverse=True)
    assert split_names(trials)[256] == ("8:8",)


def test_equal_seeds_give_equal_results() -> None:
    work = noisy(0.6, 0.7)
    assert find_b_min(work, 16, seed=5) == find_b_min(work, 16, seed=5)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (np.zeros((0, 2)), "shape"),
        (np.array([[1.0, -2.0]]), "sample 0 in module 1 is -2"),
        (np.array([[1.0, 1.0], [np.nan, 1.0]]), "sample 1 in module 0 is nan"),
        (np.zeros((3, 2)), "are 0"),
    ],
)
def test_bad_work(work: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_b_min(work, 16)


def test_fewer_gpus_than_modules() -> None:
    with pytest.raises(InfeasiblePlanError, match="1 GPUs for 2 modules"):
        find_b_min(noisy(0.5, 0.1), 1)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_bad_confidence(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        num_trials(alpha, 0.05)
