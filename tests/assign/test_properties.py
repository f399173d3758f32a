"""Rules that hold for every policy and any costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_entrain.assign import POLICIES, Assignment, assign_samples

COST_AWARE = ("entrain", "joint")
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

_cost = st.one_of(
    st.just(0.0),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.floats(min_value=0.0, max_value=1e6, allow_subnormal=False),
    st.just(1e9),
)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    num_replicas = draw(st.integers(1, 3))
    num_samples = num_replicas * draw(st.integers(0, 8))
    costs = st.lists(_cost, min_size=num_samples, max_size=num_samples)
    return {
        "encoder_cost": draw(costs),
        "llm_cost": draw(costs),
        "num_replicas": num_replicas,
        "num_microbatches": draw(st.integers(1, 7)),
        "max_lag": draw(st.integers(0, 1)),
        "seed": draw(st.integers(-(2**70), 2**70)),
        "effort": 0.2,
    }


def _sorted_loads(found: Assignment) -> list[tuple[list[float], list[float]]]:
    return [
        (found.encoder_loads(r).tolist(), found.llm_loads(r).tolist())
        for r in range(len(found.replicas))
    ]


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(batch=batches())
def test_every_sample_once_with_lag_at_most_one(policy: str, batch: dict[str, Any]) -> None:
    found = assign_samples(**batch, policy=policy)
    encoder = batch["encoder_cost"]
    found.validate(
        len(encoder), text_only=frozenset(i for i, cost in enumerate(encoder) if cost == 0)
    )
    for replica in found.replicas:
        assert replica.num_microbatches <= batch["num_microbatches"]
        assert replica.max_lag <= batch["max_lag"]
        assert sum(map(len, replica.llm)) == len(encoder) // batch["num_replicas"]


@pytest.mark.parametrize("policy", COST_AWARE)
@FEW
@given(batch=batches(), data=st.data())
def test_permuting_the_samples_permutes_the_loads(
    policy: str, batch: dict[str, Any], data: st.DataObject
) -> None:
    found = assign_samples(**batch, policy=policy)
    order = data.draw(st.permutations(range(len(batch["encoder_cost"]))))
    permuted = dict(batch)
    for name in ("encoder_cost", "llm_cost"):
        permuted[name] = [batch[name][i] for i in order]
    again = assign_samples(**permuted, policy=policy)
    assert _sorted_loads(again) == _sorted_loads(found)


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(batch=batches(), powers=st.tuples(st.integers(-40, 40), st.integers(-40, 40)))
def test_scaling_by_powers_of_two_changes_nothing(
    policy: str, batch: dict[str, Any], powers: tuple[int, int]
) -> None:
    if policy == "disttrain":  # It adds up both costs, so they share their unit.
        powers = (powers[0], powers[0])
    scaled = dict(batch)
    scaled["encoder_cost"] = [cost * 2.0 ** powers[0] for cost in batch["encoder_cost"]]
    scaled["llm_cost"] = [cost * 2.0 ** powers[1] for cost in batch["llm_cost"]]
    found = assign_samples(**batch, policy=policy)
    assert assign_samples(**scaled, policy=policy).digest() == found.digest()


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(batch=batches())
def test_replicas_may_differ_in_number_where_asked(policy: str, batch: dict[str, Any]) -> None:
    batch = {**batch, "num_replicas": 3, "equal_counts": False}
    found = assign_samples(**batch, policy=policy)
    encoder = batch["encoder_cost"]
    found.validate(
        len(encoder), text_only=frozenset(i for i, cost in enumerate(encoder) if cost == 0)
    )


@pytest.mark.parametrize("policy", COST_AWARE)
@FEW
@given(batch=batches(), data=st.data())
def test_the_token_cap_holds(policy: str, batch: dict[str, Any], data: st.DataObject) -> None:
    num_samples = len(batch["encoder_cost"])
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=num_samples, max_size=num_samples))
    # Room for everything in one microbatch less than there are, and for the largest sample.
    share = 2 * sum(tokens) // batch["num_microbatches"] + 50
    found = (
        assign_samples(**batch, policy=policy, token_counts=tokens, max_tokens=share)
        if (num_samples)
        else None
    )
    if found is not None:
        entries = [e for r in found.replicas for e in (*r.encoder, *r.llm)]
        assert max(sum(tokens[i] for i in entry) for entry in entries) <= share
