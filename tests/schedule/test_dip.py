from hypothesis import given, settings

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.schedule.dip import build_dip, expand_groups
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.types import Placement, row_counts
from lightning_entrain.schedule.verify import verify
from lightning_entrain.workload.sizes import SampleSize

from .helpers import cases, full_rows, lowered
from .test_simulate import random_costs, unit_costs


def test_three_phases():
    schedule = build_dip(Placement.colocated(2, 2, 2), full_rows(3))
    assert [" ".join(map(str, own)) for own in schedule.ranks] == [
        "0F0 0F1 0F2 2F0 2F1 2B0 2F2 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]


@given(cases(max_lag=2))
@settings(deadline=None)
def test_every_dip_schedule_verifies(case):
    placement, rows = case
    schedule = build_dip(placement, rows)
    verify(lowered(schedule, rows), rows)
    assert simulate(schedule, random_costs(0, placement, rows), rows).iteration_ms >= 0


def test_encoder_activations_of_the_whole_minibatch_are_held():
    placement, rows = Placement.colocated(2, 2, 2), full_rows(9)
    found = simulate(build_dip(placement, rows), unit_costs(placement, rows), rows)
    assert found.peak_live == (9, 9, 2, 1)


def test_groups_become_encoder_microbatches():
    replica = ReplicaAssignment(
        encoder=((0, 1, 2), (), (4,)),
        llm=((0, 1, 2), (3,), (4,)),
        groups=(((0, 2), (1,)), (), ((4,),)),
    )
    expanded = expand_groups(replica)
    assert expanded.encoder == ((0, 2), (1,), (), (4,))
    assert expanded.llm == ((), (0, 1, 2), (3,), (4,))
    plain = ReplicaAssignment(encoder=replica.encoder, llm=replica.llm)
    assert expand_groups(plain) is plain


def test_the_policys_assignment_runs():
    sizes = [
        SampleSize(grids=((1, 2 * (1 + i % 3), 4),), num_text_tokens=5, num_label_tokens=1)
        for i in range(24)
    ]
    assignment = assign_samples(
        [s.num_patches for s in sizes],
        [s.num_tokens for s in sizes],
        num_replicas=2,
        num_microbatches=4,
        policy="dip",
    )
    placement = Placement.colocated(2, 2, 2)
    for replica in assignment.replicas:
        rows = row_counts(expand_groups(replica), sizes)
        assert rows.num_microbatches == 8
        verify(lowered(build_dip(placement, rows), rows), rows)
