from __future__ import annotations

import numpy as np
import pytest

from lightning_entrain.assign import assign_samples
from lightning_entrain.assign.entrain import stratify
from lightning_entrain.assign.numbers import integer_units
from lightning_entrain.assign.problem import build_problem
from lightning_entrain.assign.replicas import split_greedy
from lightning_entrain.errors import ConfigError


def test_replicas_take_the_heaviest_image_to_the_least_llm_load() -> None:
    problem = build_problem(
        [9, 8, 7, 6, 5, 4], [5, 1, 1, 1, 3, 1], num_replicas=2, num_microbatches=1
    )
    # 0 to replica 0 (5); 1, 2, 3 to replica 1 (3 samples: full); the rest to replica 0.
    assert split_greedy(problem) == [[0, 4, 5], [1, 2, 3]]


def test_stratified_placement_step_by_step() -> None:
    encoder, llm = [6, 5, 4, 3, 2, 1], [1, 9, 1, 9, 1, 9]
    problem = build_problem(encoder, llm, num_replicas=1, num_microbatches=2)
    bins, num_images = stratify(problem, problem.order, 2)
    # Above the median: 1, 3, 5 with encoder costs 5, 3, 1; then 0, 2, 4 with 6, 4, 2.
    assert bins == [[1, 2, 4], [3, 5, 0]]
    assert num_images == [3, 3]


def test_the_threshold_is_an_argument() -> None:
    encoder, llm = [6, 5, 4, 3], [1, 2, 3, 4]
    problem = build_problem(encoder, llm, num_replicas=1, num_microbatches=4)
    # Nothing lies above the highest quantile, so the order is by encoder cost alone.
    assert stratify(problem, problem.order, 4, 1.0)[0] == [[0], [1], [2], [3]]
    assert stratify(problem, problem.order, 4, 0.5)[0] == [[2], [3], [0], [1]]


@pytest.mark.parametrize(
    ("encoder", "expected"),
    [
        ([4, 4, 4, 4], 4),
        ([8, 4, 4, 4], 2),
        ([100, 1, 1, 1], 1),
        ([0, 0, 0, 0], 6),
        ([0, 0, 3, 3], 2),
    ],
)
def test_the_heaviest_image_limits_the_microbatches(encoder: list[float], expected: int) -> None:
    found = assign_samples(
        encoder, [1, 1, 1, 1], num_replicas=1, num_microbatches=6, policy="entrain"
    )
    assert found.replicas[0].num_microbatches == expected
    free = assign_samples(
        encoder,
        [1, 1, 1, 1],
        num_replicas=1,
        num_microbatches=6,
        policy="entrain",
        limit_by_heaviest=False,
    )
    assert free.replicas[0].num_microbatches == 6


def test_deferral_evens_the_llm_loads_and_keeps_the_encoder_ones() -> None:
    # Encoder cost 6 each in two microbatches; LLM loads 6 + 3 against 1 + 2.
    encoder, llm = [3, 3, 3, 3], [6, 1, 3, 2]
    kept = assign_samples(
        encoder, llm, num_replicas=1, num_microbatches=2, policy="entrain", max_lag=0
    )
    moved = assign_samples(encoder, llm, num_replicas=1, num_microbatches=2, policy="entrain")
    assert sorted(kept.encoder_loads(0)) == sorted(moved.encoder_loads(0)) == [6, 6]
    assert kept.replicas[0].max_lag == 0
    assert max(moved.llm_loads(0)) <= max(kept.llm_loads(0))


def test_text_only_samples_even_the_llm_loads() -> None:
    encoder = [5, 5, 0, 0, 0, 0]
    llm = [9, 1, 3, 3, 1, 1]
    found = assign_samples(encoder, llm, num_replicas=1, num_microbatches=2, policy="entrain")
    found.validate(6, text_only=frozenset({2, 3, 4, 5}))
    assert sorted(found.llm_loads(0)) == [9, 9]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold_quantile": 1.5}, "threshold_quantile"),
        ({"odd": "x"}, "odd"),
        ({"max_sums": 1}, "max_sums"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        assign_samples(
            [1, 2], [1, 2], num_replicas=1, num_microbatches=2, policy="entrain", **options
        )  # type: ignore[arg-type]


def test_integer_units_keep_whole_numbers_and_powers_of_two() -> None:
    units = integer_units([1.0, 2.0, 3.0, 10.0])
    assert [unit / units[0] for unit in units] == [1, 2, 3, 10]
    assert 2**20 <= sum(units) / 4 < 2**21
    values = np.random.default_rng(0).lognormal(size=50).tolist()
    for power in (-900, -3, 5, 900):
        assert integer_units([v * 2.0**power for v in values]) == integer_units(values)
    (huge,) = set(integer_units([1.7e308] * 3))  # Their sum is not a float any more.
    assert 2**20 <= huge < 2**21
    assert integer_units([0.0, 0.0]) == [0, 0]
