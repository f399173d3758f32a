import numpy as np
import pytest

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.predict import (
    choose_for_replicas,
    iteration_objective,
    replica_step,
)
from lightning_entrain.schedule.types import Placement
from lightning_entrain.schedule.verify import verify

from .helpers import lowered

PLACEMENT, SHARES = Placement.one_per_rank(2, 2), [0.5, 0.5, 0.4, 0.6]


def batch(policy, num_samples=64, **options):
    rng = np.random.default_rng(0)
    encoder = rng.lognormal(0, 0.5, num_samples)
    encoder[::9] = 0.0  # text only
    llm = rng.lognormal(0, 0.3, num_samples)
    options = {"num_replicas": 2, "num_microbatches": 8, **options}
    return assign_samples(encoder, llm, policy=policy, **options)


def test_costs_of_a_replica_are_those_of_its_samples():
    assignment = batch("entrain")
    rows, costs = replica_step(assignment, 1, PLACEMENT, SHARES, weight_factor=0.5)
    loads = assignment.encoder_loads(1), assignment.llm_loads(1)
    assert costs.forward_ms[0] == pytest.approx(loads[0] * 0.5)
    assert costs.forward_ms[3] == pytest.approx(loads[1] * 0.6)
    assert costs.weight_ms == pytest.approx(costs.forward_ms * 0.5)
    own = assignment.replicas[1]
    assert rows.encoder == tuple(len(entry) for entry in own.encoder)
    for (k, j), share in costs.segment_shares.items():
        members = own.segments()[k, j]
        assert share == pytest.approx(sum(assignment.encoder_cost[i] for i in members))


def test_every_policy_gets_valid_schedules():
    for policy in ("fixed", "disttrain", "entrain", "joint"):
        assignment = batch(policy)
        choices = choose_for_replicas(
            assignment, PLACEMENT, SHARES, num_steps=50, may_reorder=False
        )
        assert len(choices) == 2
        for replica, choice in enumerate(choices):
            rows, _ = replica_step(assignment, replica, PLACEMENT, SHARES)
            verify(lowered(choice.tuned.schedule, rows), rows)


def test_balance_shows_in_the_objective():
    objective = iteration_objective(PLACEMENT, SHARES, num_steps=50)
    assert objective(batch("joint")) < objective(batch("fixed"))
    tight = iteration_objective(PLACEMENT, SHARES, num_steps=50, max_bytes=0.1)
    assert tight(batch("joint")) == float("inf")


def test_assignment_chosen_by_the_objective_is_not_worse():
    objective = iteration_objective(PLACEMENT, SHARES, num_steps=50, overhead_ms=0.05)
    chosen = batch("joint", num_microbatches=(6, 9), objective=objective)
    for num in (6, 7, 8, 9):
        assert objective(chosen) <= objective(batch("joint", num_microbatches=num)) * (1 + 1e-9)


def test_unknown_costs_are_refused():
    assignment = batch("fixed")
    bare = type(assignment)(replicas=assignment.replicas, policy="fixed")
    with pytest.raises(ScheduleError, match="with_costs"):
        replica_step(bare, 0, PLACEMENT, SHARES)
