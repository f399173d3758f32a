"""What other policies would have cost: equal to the run itself where it used that policy."""

from dataclasses import replace

import pytest

from lightning_entrain.assign import assign_samples
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.observe.counterfactual import (
    Pipeline,
    TrainedBatch,
    as_trained,
    compare_policies,
    in_sampler_order,
)
from lightning_entrain.observe.run_page import (
    SAMPLER_ORDER,
    entrain_text,
    gain_over_fixed,
    gain_parts,
    gain_text,
    run_page,
)
from lightning_entrain.observe.run_record import RunRecord, policies_to_dict
from lightning_entrain.runtime.step_plan import StepPlanner
from lightning_entrain.schedule.types import Placement
from lightning_entrain.workload.sizes import SampleSize

SIZES = list(synthetic_dataset(32, seed=3).sizes)
PLACEMENT = Placement.one_per_rank(1, 1)


def pipeline(name="1f1b", stage_shares=(1.0, 1.0)):
    """Runs the schedule that the runtime would."""
    planner = StepPlanner(
        placement=PLACEMENT,
        replica=0,
        schedule=name,
        boundary_columns=(8,),
        dtype="float32",
        stage_shares=stage_shares,
        stage_factors=((1 / 3,) * 3,) * 2,
    )
    return Pipeline(
        placement=PLACEMENT,
        stage_shares=stage_shares,
        schedule=lambda assignment, replica, sizes: replace(
            planner, replica=replica
        ).train_schedule(assignment, sizes)[0],
        schedule_name=name,
    )


PIPELINE = pipeline()


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


def by_hand(policy):
    """Four samples, two microbatches; a sample costs both modules 9, 9, 3 and 3 ms."""
    sizes = [SampleSize(grids=((1, 2, 2),), num_text_tokens=4, num_label_tokens=1)] * 4
    costs = [9.0, 9.0, 3.0, 3.0]
    assignment = assign_samples(
        costs, costs, num_replicas=1, num_microbatches=2, policy=policy, max_lag=0
    )
    return TrainedBatch(assignment=assignment, sizes=sizes)


# Sampler order has microbatches of 18 and 6 ms in both modules, so F 6 and 2, B 12 and 4. Under
# 1F1B the LLM does F0 6-12, B0 12-24, F1 24-26, B1 26-30, the encoder B0 24-36, B1 36-40.
# `entrain` has 12 and 12, so F 4, B 8: the LLM ends F0 at 8, B0 at 16, F1 at 20, B1 at 28, the
# encoder B1 at 36. DistTrain's order begins with the light one: F0 0-2 and F1 2-8 in the encoder,
# F0 2-4, B0 4-8, F1 8-14, B1 14-26 in the LLM, B1 26-38 in the encoder.
BY_HAND = {"fixed": 40.0, "disttrain": 38.0, "entrain": 36.0}
SCHEDULES = {"1f1b": "1F1B", "zero_bubble": "zero bubble", "auto": "the fastest of all"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("policy", ["fixed", "disttrain", "entrain"])
def test_each_policy_has_its_own_schedule_and_the_runs_own_that_of_the_run(policy, name):
    batches, own_pipeline = [by_hand(policy)], pipeline(name)
    own = as_trained(batches, own_pipeline)
    compared = compare_policies(batches, own_pipeline, own=own)
    assert compared.pop(policy) == own
    assert own.schedule.startswith(SCHEDULES[name])
    for other, outcome in compared.items():
        assert outcome.step_ms == pytest.approx(BY_HAND[other]), other
        deferral = " with deferral" if other == "entrain" else ""
        assert outcome.schedule == f"1F1B{deferral}"
    if name == "1f1b":
        assert own.step_ms == pytest.approx(BY_HAND[policy])
    elif policy == "fixed":
        assert own.step_ms < BY_HAND[policy] - 1
    record = RunRecord(
        policy=policy, policies=policies_to_dict({"this run": own, **compared, policy: own})
    )
    gain, text = gain_over_fixed(record), gain_text(record)
    assert f"this run ({policy}, {SCHEDULES[name]}" in text
    if policy == "fixed":
        assert gain == 0.0
        assert "is sampler order itself" in text
    else:
        assert gain == pytest.approx(40.0 / own.step_ms - 1)
        assert text.endswith("against sampler order (fixed, 1F1B)")


def test_a_gain_is_told_apart_into_assignment_and_schedule():
    """Under zero bubble sampler order is faster, too: only the rest is the assignment's."""
    own_pipeline = pipeline("zero_bubble")
    trained = [by_hand("disttrain")]
    own = as_trained(trained, own_pipeline)
    between = in_sampler_order(trained, own_pipeline)
    assert between == as_trained([by_hand("fixed")], own_pipeline)
    assert between.step_ms < BY_HAND["fixed"]
    rows = {"this run": own, SAMPLER_ORDER: between}
    rows |= compare_policies(trained, own_pipeline, own=own)
    record = RunRecord(policy="disttrain", policies=policies_to_dict(rows))
    assignment, schedule = gain_parts(record)
    assert assignment == pytest.approx(between.step_ms / own.step_ms - 1)
    assert schedule == pytest.approx(BY_HAND["fixed"] / between.step_ms - 1)
    assert (1 + assignment) * (1 + schedule) == pytest.approx(1 + gain_over_fixed(record))
    assert f"of which assignment {assignment:+.0%}, schedule" in gain_text(record)
    assert entrain_text(record) == ""
    record.policies["entrain"]["step_ms"] = 44.0
    assert "entrain takes 10% longer" in run_page(record)


def test_deferral_stays_within_the_memory_of_the_run():
    trained = batches("fixed")
    free, roomy, tight = (
        compare_policies(trained, replace(PIPELINE, max_live=live), ["entrain"])["entrain"].step_ms
        for live in (None, 9.0, 0.1)
    )
    assert free == roomy
    assert tight > free
