from __future__ import annotations

import numpy as np
import pytest

from lightning_entrain.assign import assign_samples
from lightning_entrain.assign.disttrain import reorder
from lightning_entrain.errors import ConfigError


def test_disttrain_gives_the_largest_to_the_lightest_replica() -> None:
    encoder, llm = [8, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1]
    found = assign_samples(
        encoder,
        llm,
        num_replicas=2,
        num_microbatches=1,
        policy="disttrain",
        equal_counts=False,
    )
    # Sizes 10, 2, 2, 2, 2, 2: the giant alone against the five others.
    assert [replica.llm for replica in found.replicas] == [((0,),), ((1, 2, 3, 4, 5),)]
    equal = assign_samples(encoder, llm, num_replicas=2, num_microbatches=1, policy="disttrain")
    assert [len(replica.llm[0]) for replica in equal.replicas] == [3, 3]


def test_disttrain_microbatches_keep_sampler_order_inside() -> None:
    cost = np.random.default_rng(0).lognormal(size=64)
    found = assign_samples(cost, cost, num_replicas=2, num_microbatches=8, policy="disttrain")
    for replica in found.replicas:
        runs = sorted(replica.llm)
        assert [i for run in runs for i in run] == sorted(i for run in runs for i in run)
        assert {len(run) for run in runs} == {4}
        assert replica.encoder == replica.llm


def test_disttrain_order_is_smallest_first_and_the_small_ones_last() -> None:
    sizes = [5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 8.0, 4.0, 6.0]
    order = reorder(sizes, sizes, 4)
    assert sorted(order) == list(range(9))
    assert order[0] == 1
    assert [sizes[k] for k in order[-3:]] == [2, 3, 4]
    # One stage: no microbatch is kept for the end.
    assert reorder(sizes, sizes, 1)[0] == 1


def test_disttrain_fills_the_first_stages_idle_interval_with_the_nearest() -> None:
    # Two stages, one per module. The first microbatch (1, 3) comes back at 10, 9 after its forward
    # left the first stage: a forward of 9 fills the wait. That one comes back 25 after its oldest
    # partner's backward ended, so 20 is nearer than 4. The smallest one left comes last.
    encoder, llm = [1.0, 4.0, 9.0, 2.0, 20.0], [3.0, 9.0, 9.0, 3.0, 9.0]
    assert reorder(encoder, llm, 2) == [0, 2, 4, 1, 3]


def test_dip_splits_each_microbatch_evenly() -> None:
    encoder = [5, 4, 3, 2, 0, 7, 0, 0]
    found = assign_samples(
        encoder, [1] * 8, num_replicas=1, num_microbatches=2, policy="dip", num_groups=2
    )
    (replica,) = found.replicas
    assert replica.llm == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert replica.groups == (((0, 3), (1, 2)), ((5,),))
    assert found.to_dict()["replicas"][0]["groups"] == [[[0, 3], [1, 2]], [[5]]]


@pytest.mark.parametrize(("policy", "option"), [("disttrain", "num_stages"), ("dip", "num_groups")])
def test_counts_below_one_are_refused(policy: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        assign_samples([1], [1], num_replicas=1, num_microbatches=1, policy=policy, **{option: 0})
