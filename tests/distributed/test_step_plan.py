"""Planning a step keeps to the memory that plans reserve, whatever the batch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from lightning_entrain.assign import assign_samples
from lightning_entrain.planning import named_device
from lightning_entrain.runtime.step_plan import StepPlanner, live_cap
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.types import Placement
from lightning_entrain.workload.sizes import SampleSize

SIZES = tuple(
    SampleSize(grids=((1, 4, 4 + 2 * (i % 3)),), num_text_tokens=10 + i % 4, num_label_tokens=5)
    for i in range(48)
)
COSTS = [float(s.num_patches) for s in SIZES], [float(s.num_tokens) for s in SIZES]
PLANNER = StepPlanner(
    placement=Placement.one_per_rank(2, 2),
    replica=0,
    schedule="auto",
    boundary_columns=(8, 8, 8),
    dtype="float32",
    stage_shares=(0.5, 0.5, 0.5, 0.5),
    num_steps=50,
)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_automatic_choice_keeps_to_the_memory_cap(lag: int) -> None:
    assignment = assign_samples(
        *COSTS, num_replicas=1, num_microbatches=16, policy="joint", max_lag=lag
    )
    plan = PLANNER(assignment, SIZES, train=True)
    rows, costs = replica_step(assignment, 0, PLANNER.placement, (0.5,) * 4, sizes=SIZES)
    compute = tuple(
        tuple(action for action in own if action.kind.is_compute)
        for own in plan.program.schedule.ranks
    )
    found = simulate(replace(plan.program.schedule, ranks=compute), costs, rows)
    cap = live_cap(PLANNER.placement)
    assert cap == 5
    assert max(found.peak_bytes) <= cap * (1 + 1e-6)
    assert plan.predicted_ms == pytest.approx(found.iteration_ms)


def test_a_batch_that_no_order_fits_still_runs() -> None:
    sizes = (replace(SIZES[0], grids=((1, 80, 80),)), *SIZES[:7])
    costs = [float(s.num_patches) for s in sizes], [float(s.num_tokens) for s in sizes]
    assignment = assign_samples(
        *costs, num_replicas=1, num_microbatches=8, policy="fixed"
    ).with_costs(*costs)
    plan = PLANNER(assignment, sizes, train=True)
    assert plan.program.schedule.name == "1f1b"
    assert plan.predicted_ms


def test_cap_of_ranks_with_several_stages() -> None:
    assert live_cap(Placement.colocated(2, 2, 1)) == 11
    assert live_cap(Placement.shared_boundary(2, 2)) == 6


def test_planners_and_plans_travel_between_processes() -> None:
    assignment = assign_samples(*COSTS, num_replicas=1, num_microbatches=4, max_lag=0)
    planner = pickle.loads(pickle.dumps(PLANNER))
    plan = planner(assignment, SIZES, train=True)
    again = pickle.loads(pickle.dumps(plan))
    assert again.program == plan.program
    assert (again.batch_digest, again.program_digest) == (plan.batch_digest, plan.program_digest)
    other = planner(assignment, (*SIZES[1:], SIZES[0]), train=True)
    assert other.batch_digest != plan.batch_digest


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-40"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A4000", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_devices_are_known_by_whole_words(name: str, device: str) -> None:
    assert named_device(name).name == device
