"""What other policies would have cost: equal to the run itself where it used that policy."""

import pytest

from lightning_entrain.assign import assign_samples
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.observe.counterfactual import (
    Pipeline,
    TrainedBatch,
    as_trained,
    compare_policies,
)
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.types import Placement

SIZES = list(synthetic_dataset(32, seed=3).sizes)
PIPELINE = Pipeline(
    placement=Placement.one_per_rank(1, 1), stage_shares=(1.0, 1.0), schedule=build_1f1b
)


def batches(policy, num_replicas=1):
    found = []
    for start in (0, 16):
        sizes = SIZES[start : start + 16]
        costs = [s.num_patches / 10 for s in sizes], [s.num_tokens / 3 for s in sizes]
        assignment = assign_samples(
            *costs, num_replicas=num_replicas, num_microbatches=4, policy=policy, max_lag=0
        )
        found.append(TrainedBatch(assignment=assignment, sizes=sizes))
    return found


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fixed_trained_equals_fixed_compared(num_replicas):
    trained = batches("fixed", num_replicas)
    compared = compare_policies(trained, PIPELINE)
    assert set(compared) == {"fixed", "disttrain", "entrain"}
    assert compared["fixed"] == as_trained(trained, PIPELINE)
    assert compared["entrain"].encoder_cv < compared["fixed"].encoder_cv
    if num_replicas == 1:  # with 8 samples per replica it has too little to choose from
        assert compared["entrain"].step_ms < compared["fixed"].step_ms


def test_the_comparison_does_not_depend_on_what_the_run_did():
    one, other = (compare_policies(batches(p), PIPELINE) for p in ("fixed", "entrain"))
    assert one["fixed"] == other["fixed"]
    assert one["disttrain"].step_ms == pytest.approx(other["disttrain"].step_ms)


def test_one_microbatch_takes_the_sum_of_both_modules():
    sizes = SIZES[1:2]
    assignment = assign_samples([3.0], [6.0], num_replicas=1, num_microbatches=1, policy="fixed")
    batch = TrainedBatch(assignment=assignment, sizes=sizes)
    assert sizes[0].has_images
    assert as_trained([batch], PIPELINE).step_ms == pytest.approx(9.0)
