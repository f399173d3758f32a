from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from lightning_entrain.assign import (
    Assignment,
    ReplicaAssignment,
    assign_samples,
    imbalance,
    peak,
    squared_deviations,
)
from lightning_entrain.assign.bounds import load_bound
from lightning_entrain.errors import AssignmentError


def test_imbalance_agrees_with_numpy() -> None:
    loads = np.random.default_rng(1).lognormal(size=17)
    found = imbalance(loads.tolist())
    assert found.mean == pytest.approx(loads.mean())
    assert found.std == pytest.approx(loads.std())
    assert found.cv == pytest.approx(loads.std() / loads.mean())
    assert found.max_over_mean == pytest.approx(loads.max() / loads.mean())


@pytest.mark.parametrize("loads", [[], [0.0, 0.0]])
def test_nothing_counts_as_even(loads: list[float]) -> None:
    found = imbalance(loads)
    assert (found.cv, found.std, found.max_over_mean) == (0, 0, 1)


def test_squared_deviations_and_peak() -> None:
    encoder, llm = [1.0, 3.0], [6.0, 2.0]
    assert squared_deviations(encoder, llm) == pytest.approx(2 * 0.5**2 + 2 * 0.5**2)
    assert peak(encoder, llm) == pytest.approx(max(0.5 + 1.5, 1.5 + 0.5))
    assert peak([0.0, 0.0], llm) == pytest.approx(1.5)
    assert peak([1e308, 1e308], [1e308, 0.0]) == pytest.approx(3)


def test_bounds_hold_for_every_assignment_and_some_reach_them() -> None:
    generator = random.Random(3)
    reached = {"max": 0, "cv": 0}
    for _ in range(60):
        costs = [float(generator.choice([0, 1, 1, 2, 5, 9])) for _ in range(5)]
        num_bins = generator.randint(1, 4)
        best_max = best_cv = math.inf
        for places in itertools.product(range(num_bins), repeat=len(costs)):
            loads = [0.0] * num_bins
            for cost, b in zip(costs, places, strict=True):
                loads[b] += cost
            best_max = min(best_max, max(loads))
            best_cv = min(best_cv, imbalance(loads).cv)
        bound = load_bound(costs, [0.0] * num_bins)
        assert bound.max_load <= best_max + 1e-12
        assert bound.cv <= best_cv + 1e-12
        reached["max"] += bound.max_load == best_max
        reached["cv"] += bound.cv == pytest.approx(best_cv)
    assert reached["max"] > 20
    assert reached["cv"] > 20


def test_each_bound_binds_where_it_should() -> None:
    even = load_bound([1.0] * 8, [2.0] * 4)
    assert (even.mean, even.parity, even.max_load, even.cv) == (2, 2, 2, 0)
    assert (even.max_load_gap, even.cv_gap) == (0, 0)
    giant = load_bound([10.0, 1.0, 1.0], [10.0, 1.0, 1.0])
    assert giant.max_load == giant.heaviest == 10
    assert giant.cv == pytest.approx(imbalance([10.0, 1.0, 1.0]).cv)
    odd = load_bound([1.0] * 5, [2.0, 1.0, 2.0])
    assert odd.max_load == odd.parity == 2 > odd.mean
    assert odd.cv == pytest.approx(imbalance([2.0, 2.0, 1.0]).cv)


def test_bounds_lie_beside_the_result() -> None:
    found = assign_samples([4, 3, 2, 1], [1, 1, 1, 9], num_replicas=2, num_microbatches=2)
    assert len(found.bounds.encoder) == len(found.bounds.llm) == 2
    for r in range(2):
        assert found.bounds.encoder[r].max_load_found == max(found.encoder_loads(r))
        assert found.bounds.llm[r].max_load_gap >= 0
    assert found.bounds.llm_replicas.heaviest == 9
    assert found.bounds.encoder_replicas.mean == 5


def test_measures_per_replica_and_across() -> None:
    replicas = (
        ReplicaAssignment(encoder=((0,), (1,)), llm=((0,), (1,))),
        ReplicaAssignment(encoder=((2,), ()), llm=((), (2,))),
    )
    found = Assignment(replicas=replicas, policy="x").with_costs([1, 3, 4], [2, 2, 6])
    assert found.encoder_loads(0).tolist() == [1, 3]
    assert found.llm_loads(1).tolist() == [0, 6]
    assert found.imbalance("encoder", 0).cv == pytest.approx(0.5)
    assert found.imbalance("llm").mean == pytest.approx(2.5)
    assert found.replica_imbalance("llm").max_over_mean == pytest.approx(6 / 5)
    assert found.replica_imbalance("encoder").cv == 0


def test_loads_without_costs_are_refused() -> None:
    bare = Assignment(replicas=(ReplicaAssignment(encoder=((0,),), llm=((0,),)),), policy="x")
    with pytest.raises(AssignmentError, match=r"holds no llm costs.*Remedy"):
        bare.llm_loads(0)


def test_costs_do_not_enter_equality_digest_or_json() -> None:
    found = assign_samples([1, 2], [2, 1], num_replicas=1, num_microbatches=2)
    again = Assignment.from_dict(found.to_dict())
    assert again == found
    assert again.digest() == found.digest()
    assert again.encoder_cost is None


def test_groups_survive_json() -> None:
    found = assign_samples([1, 2, 0, 4], [1] * 4, num_replicas=1, num_microbatches=2, policy="dip")
    assert Assignment.from_dict(found.to_dict()).replicas[0].groups == found.replicas[0].groups
