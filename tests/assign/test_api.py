from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lightning_entrain.assign import POLICIES, Assignment, assign_samples, trapezoid
from lightning_entrain.assign.ramps import resample
from lightning_entrain.errors import AssignmentError, ConfigError


def _assign(encoder: Any, llm: Any, **arguments: Any) -> Assignment:
    return assign_samples(encoder, llm, **{"num_replicas": 1, "num_microbatches": 2, **arguments})


@pytest.mark.parametrize(
    ("encoder", "llm", "arguments", "words"),
    [
        ([1, math.nan], [1, 1], {}, r"encoder_cost\[1\] is nan.*finite.*Remedy"),
        ([1, 1], [math.inf, 1], {}, r"llm_cost\[0\] is inf"),
        ([1, 1], [1, -2.0], {}, r"llm_cost\[1\] is -2.0.*from 0 to"),
        ([1e308, 1e308], [1, 1], {}, r"encoder_cost\[0\] is 1e\+308.*to 1e\+300"),
        (["1", "2"], [1, 1], {}, r"encoder_cost\[0\] is '1'.*real numbers.*Remedy"),
        ([1, 1j], [1, 1], {}, r"encoder_cost\[0\] is \(1\+0j\)"),
        ([1, None], [1, 1], {}, r"encoder_cost\[1\] is None"),
        ([1, [2]], [1, 1], {}, "encoder_cost cannot be read as numbers"),
        ([1, 10**400], [1, 1], {}, "encoder_cost cannot be read as numbers: int too large"),
        ([1, 1], [1], {}, "2 entries and llm_cost 1"),
        ([[1, 1]], [1, 1], {}, "2 dimensions"),
        ([1, 1, 1], [1, 1, 1], {"num_replicas": 2}, "3 samples cannot be shared.*equal_counts"),
        ([1, 1], [1, 1], {"num_replicas": 0}, "num_replicas is 0"),
        ([1, 1], [1, 1], {"num_microbatches": 0}, "num_microbatches is 0"),
        ([1, 1], [1, 1], {"num_microbatches": 1.5}, "num_microbatches is 1.5"),
        ([1, 1], [1, 1], {"num_microbatches": None}, "num_microbatches is None"),
        ([1, 1], [1, 1], {"num_microbatches": math.inf}, "num_microbatches is inf"),
        ([1, 1], [1, 1], {"num_replicas": "two"}, "num_replicas is 'two'"),
        ([1, 1], [1, 1], {"seed": "x"}, "seed is 'x'"),
        ([1, 1], [1, 1], {"effort": 1e300}, r"effort is 1e\+300"),
        ([1, 1], [1, 1], {"policy": ["joint"]}, "policy is .*joint"),
        ([1, 1], [1, 1], {"max_tokens": "5", "token_counts": [1, 1]}, "max_tokens is '5'"),
        ([1, 1], [1, 1], {"num_microbatches": (3, 2)}, r"\(3, 2\).*low <= high"),
        ([1, 1], [1, 1], {"num_microbatches": "many"}, "'many'.*'auto'"),
        ([1, 1], [1, 1], {"max_lag": 2}, "max_lag is 2.*0 or 1"),
        ([1, 1], [1, 1], {"effort": 0}, "effort is 0"),
        ([1, 1], [1, 1], {"effort": math.nan}, "effort is nan"),
        ([1, 1], [1, 1], {"policy": "best"}, "policy is 'best'.*joint"),
        ([1, 1], [1, 1], {"policy": "dip", "odd": "alone"}, "odd is set.*num_groups"),
        ([1, 1], [1, 1], {"ramp": [1, 0]}, "ramp is.*positive"),
        ([1, 1], [1, 1], {"ramp": [1, 2], "policy": "entrain"}, "ramp is set with policy"),
        ([1, 1], [1, 1], {"max_tokens": 5}, "token_counts is missing"),
        ([1, 1], [1, 1], {"max_tokens": 5, "token_counts": [1]}, "2 integers"),
        ([1, 1], [1, 1], {"max_tokens": 5, "token_counts": [1.5, 2]}, "2 integers"),
        ([1, 1], [1, 1], {"max_tokens": 5, "token_counts": [6, 1]}, r"token_counts\[0\] is 6"),
        ([1, 1], [1, 1], {"objective": lambda found: math.nan}, "objective returned nan"),
    ],
)
def test_errors_name_value_limit_and_remedy(
    encoder: Any, llm: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises((AssignmentError, ConfigError), match=words):
        _assign(encoder, llm, **arguments)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("encoder", "num_microbatches"),
    [
        ([0.0] * 4, 3),
        ([1.0] * 4, 1),
        ([3.0, 1.0, 4.0, 1.0, 5.0, 9.0], 5),
        ([3.0, 1.0], 8),
        ([1.0] * 15 + [20.0], 4),
        ([], 3),
        ([-0.0, 1.0], 2),
    ],
    ids=["only text", "K=1", "odd K", "K > samples", "giant", "no samples", "minus zero"],
)
def test_odd_batches_are_legal(policy: str, encoder: list[float], num_microbatches: int) -> None:
    for llm in ([1.0] * len(encoder), [0.0] * len(encoder)):
        found = _assign(encoder, llm, num_microbatches=num_microbatches, policy=policy)
        found.validate(
            len(encoder), text_only=frozenset(i for i, cost in enumerate(encoder) if cost == 0)
        )
        assert found.policy == policy
        assert found.bounds.encoder[0].max_load_gap >= 0


def test_everything_free_is_spread_by_number() -> None:
    for policy in POLICIES:
        found = _assign([0.0] * 12, [0.0] * 12, num_microbatches=4, policy=policy)
        assert [len(entry) for entry in found.replicas[0].llm] == [3] * 4


def test_the_cap_is_kept_or_refused() -> None:
    encoder, llm = [8.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 6
    tokens = [2, 2, 2, 2, 2, 2]
    free = _assign(encoder, llm, num_microbatches=4, policy="entrain")
    assert max(len(entry) for entry in free.replicas[0].llm) > 2
    for policy in ("entrain", "joint"):
        kept = _assign(
            encoder, llm, num_microbatches=4, policy=policy, token_counts=tokens, max_tokens=4
        )
        # The giant allows one microbatch only, the cap needs three.
        assert [r.num_microbatches for r in kept.replicas] == [3]
        assert {len(e) for r in kept.replicas for e in (*r.encoder, *r.llm)} == {2}
    with pytest.raises(AssignmentError, match=r"None of 2 microbatches.*max_tokens is 4"):
        _assign(encoder, llm, policy="entrain", token_counts=tokens, max_tokens=4)
    for policy in ("fixed", "disttrain", "dip"):
        with pytest.raises(AssignmentError, match=f"Policy '{policy}' puts 6 tokens"):
            _assign(encoder, llm, policy=policy, token_counts=tokens, max_tokens=4)


def test_joint_fits_what_the_greedy_algorithm_cannot() -> None:
    # Only {6, 4}, {5, 5} fit in two microbatches of 10; by cost the greedy puts 5 and 4 together.
    tokens, encoder = [6, 5, 5, 4], [1.0, 11.0, 9.0, 10.0]
    arguments = {"token_counts": tokens, "max_tokens": 10, "limit_by_heaviest": False}
    with pytest.raises(AssignmentError, match="has room for sample"):
        _assign(encoder, [1.0] * 4, policy="entrain", **arguments)
    found = _assign(encoder, [1.0] * 4, policy="joint", **arguments)
    assert {frozenset(entry) for entry in found.replicas[0].llm} == {
        frozenset({0, 3}),
        frozenset({1, 2}),
    }


def test_counts_that_the_cap_rules_out_are_not_chosen() -> None:
    found = _assign(
        [1.0] * 8, [1.0] * 8, num_microbatches=(2, 4), token_counts=[1] * 8, max_tokens=2
    )
    assert found.replicas[0].num_microbatches == 4


def test_the_count_is_chosen_by_evenness() -> None:
    # Twelve equal samples: 5 microbatches cannot be even, 4 and 6 can; 6 is as near, and more.
    found = _assign([1.0] * 12, [1.0] * 12, num_microbatches=(4, 6))
    assert found.replicas[0].num_microbatches == 6
    auto = _assign([1.0] * 16, [1.0] * 16, num_microbatches="auto")
    assert auto.replicas[0].num_microbatches == 4


def test_the_objective_sees_all_candidates_and_decides() -> None:
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(size=24), generator.lognormal(size=24)
    seen: list[tuple[int, int]] = []

    def fewest_lags(found: Assignment) -> float:
        replica = found.replicas[0]
        seen.append((replica.num_microbatches, replica.max_lag))
        return abs(replica.num_microbatches - 5) + 0.5 * replica.max_lag

    found = _assign(encoder, llm, num_microbatches=(4, 7), objective=fewest_lags)
    assert (found.replicas[0].num_microbatches, found.replicas[0].max_lag) == (5, 0)
    assert {k for k, _ in seen} == {4, 5, 6, 7}
    assert {lag for _, lag in seen} == {0, 1}


def test_the_objective_may_prefer_more_microbatches_than_the_heaviest_allows() -> None:
    encoder = [20.0] + [1.0] * 23

    def heaviest_llm(found: Assignment) -> float:
        return float(max(found.llm_loads(0)))

    plain = _assign(encoder, [1.0] * 24, num_microbatches=8)
    chosen = _assign(encoder, [1.0] * 24, num_microbatches=8, objective=heaviest_llm)
    assert plain.replicas[0].num_microbatches == 2
    assert chosen.replicas[0].num_microbatches == 8
    assert heaviest_llm(chosen) <= 4 < heaviest_llm(plain)


def test_an_objective_works_with_any_policy() -> None:
    found = _assign(
        [1.0] * 8,
        [1.0] * 8,
        num_microbatches=(2, 4),
        policy="disttrain",
        objective=lambda a: a.replicas[0].num_microbatches,
    )
    assert found.replicas[0].num_microbatches == 2


def test_a_ramp_is_followed() -> None:
    cost = np.random.default_rng(0).integers(50, 150, size=96).astype(float)
    profile = (0.25, 0.5, *[1.0] * 5, 0.75)
    found = _assign(cost, cost, num_microbatches=8, ramp=profile)
    target = np.array(profile) * cost.sum() / sum(profile)
    for loads in (found.encoder_loads(0), found.llm_loads(0)):
        assert np.abs(loads / target - 1).max() < 0.02
    # Lighter ends are asked for, so a heavy sample does not lower the number of microbatches.
    giant = _assign([500.0, *cost], [500.0, *cost], num_microbatches=8, ramp=profile)
    assert giant.replicas[0].num_microbatches == 8


def test_profiles() -> None:
    assert trapezoid(6, edge=0.5, width=2) == (0.5, 0.75, 1.0, 1.0, 0.75, 0.5)
    assert trapezoid(1) == (0.25,)
    assert resample([1.0, 3.0], 3) == (1.0, 2.0, 3.0)
    assert resample([1.0, 3.0], 1) == (1.0,)
    assert resample([2.0], 3) == (2.0, 2.0, 2.0)
    with pytest.raises(ConfigError, match="edge 0"):
        trapezoid(4, edge=0)
