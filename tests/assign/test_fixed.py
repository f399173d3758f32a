from __future__ import annotations

import pytest

from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.errors import AssignmentError


def test_samples_stay_in_order_and_runs_differ_by_at_most_one() -> None:
    found = assign_fixed([True] * 11, num_replicas=2, num_microbatches=4)
    assert [replica.llm for replica in found.replicas] == [
        ((0, 1), (2, 3), (4,), (5,)),
        ((6, 7), (8,), (9,), (10,)),
    ]
    assert all(replica.encoder == replica.llm for replica in found.replicas)
    assert found.policy == "fixed"


def test_text_only_samples_are_in_the_llm_lists_alone() -> None:
    has_images = [True, False, False, True, False]
    (replica,) = assign_fixed(has_images, num_replicas=1, num_microbatches=3).replicas
    assert replica.llm == ((0, 1), (2, 3), (4,))
    assert replica.encoder == ((0,), (3,), ())


@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_the_rules_of_an_assignment_hold(
    num_samples: int, num_replicas: int, num_microbatches: int
) -> None:
    has_images = [i % 3 != 0 for i in range(num_samples)]
    found = assign_fixed(has_images, num_replicas=num_replicas, num_microbatches=num_microbatches)
    found.validate(num_samples, text_only=frozenset(range(0, num_samples, 3)))
    assert len(found.replicas) == num_replicas
    for replica in found.replicas:
        assert replica.num_microbatches == num_microbatches
        assert replica.max_lag == 0


@pytest.mark.parametrize("counts", [(0, 1), (1, 0)])
def test_a_count_below_one_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(AssignmentError, match="is 0"):
        assign_fixed([True], num_replicas=counts[0], num_microbatches=counts[1])
