"""Stages before the first trained one run forward alone, in every schedule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.dip import build_dip
from lightning_entrain.schedule.limits import step_limits
from lightning_entrain.schedule.list_schedule import tune_list_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import Link, StepCosts, simulate
from lightning_entrain.schedule.tables import unit_costs
from lightning_entrain.schedule.types import Action, ActionKind, Placement, Schedule
from lightning_entrain.schedule.verify import peak_live, verify
from lightning_entrain.schedule.zero_bubble import tune_zero_bubble
from tests.schedule.helpers import cases, full_rows, lowered, runs_blocking

BACKWARD = {ActionKind.B, ActionKind.I, ActionKind.W}


def all_schedules(placement, rows):
    costs = unit_costs(placement, rows)
    caps = [placement.num_stages + 1] * placement.num_stages
    yield build_1f1b(placement, rows, caps=caps)
    yield build_1f1b(placement, rows, split_backward=True, caps=caps)
    yield build_dip(placement, rows)
    tuned = [tune_list_schedule(placement, rows, costs, num_steps=3, may_reorder=False)]
    if tuple(sorted(placement.stage_to_rank)) == placement.stage_to_rank:
        tuned.append(tune_zero_bubble(placement, rows, costs, num_steps=20, may_reorder=False))
    for one in tuned:
        yield one.schedule


@settings(max_examples=60, deadline=None)
@given(cases(), st.floats(0, 1))
def test_no_backward_before_the_first_trained_stage(case, where):
    placement, rows = case
    first = min(int(where * placement.num_stages), placement.num_stages - 1)
    placement = replace(placement, first_backward=first)
    for schedule in all_schedules(placement, rows):
        program = lowered(schedule, rows)
        verify(program, rows)
        assert runs_blocking(program, rows)
        for action in (a for own in program.schedule.ranks for a in own):
            if action.kind in BACKWARD or action.kind is ActionKind.RECV_B:
                assert action.stage >= first
            if action.kind is ActionKind.SEND_B:
                assert action.stage > first
        assert Schedule.from_text(schedule.to_text()) == schedule
        simulate(schedule, unit_costs(placement, rows), rows)


PLACEMENT = replace(Placement.one_per_rank(2, 2), first_backward=2)
ROWS = full_rows(8)


def test_a_gradient_on_a_frozen_stage_is_refused():
    schedule = build_1f1b(PLACEMENT, ROWS)
    ranks = ((*schedule.ranks[0], Action(0, ActionKind.W, 3)), *schedule.ranks[1:])
    with pytest.raises(ScheduleError, match=r"rank 0, .*0W3: nothing is trained up to this stage"):
        verify(lowered(replace(schedule, ranks=ranks), ROWS), ROWS)


def test_a_missing_backward_after_it_is_refused():
    schedule = build_1f1b(PLACEMENT, ROWS)
    own = tuple(a for a in schedule.ranks[2] if a != Action(2, ActionKind.B, 3))
    ranks = (*schedule.ranks[:2], own, schedule.ranks[3])
    with pytest.raises(ScheduleError, match="B or I of microbatch 3 on stage 2 is missing"):
        verify(lowered(replace(schedule, ranks=ranks), ROWS), ROWS)


def test_a_first_stage_that_does_not_exist_is_refused():
    with pytest.raises(ScheduleError, match=r"first_backward is 4.*0 to 3"):
        replace(PLACEMENT, first_backward=4)


def test_frozen_stages_hold_no_activations():
    schedule = build_1f1b(PLACEMENT, ROWS)
    assert peak_live(schedule, ROWS) == (1, 1, 2, 1)
    found = simulate(schedule, unit_costs(PLACEMENT, ROWS), ROWS)
    assert found.peak_live == (1, 1, 2, 1)
    assert found.peak_bytes == (1.0, 1.0, 2.0, 1.0)


def test_frozen_stages_that_share_a_rank_do_not_run_far_ahead():
    placement = replace(Placement.colocated(2, 2, 2), first_backward=2)
    schedule = build_1f1b(placement, ROWS)
    for own in schedule.ranks:
        waiting = {0: 0, 2: 0} if own[0].stage == 0 else {1: 0, 3: 0}
        peak = 0
        for action in own:
            if action.kind is ActionKind.F:
                waiting[action.stage] += 1
                peak = max(peak, waiting[min(waiting)] - waiting[max(waiting)])
        assert 0 < peak <= 4


def test_frozen_stages_shorten_the_step():
    """Three forwards before the last rank, its own 24 units; 1F1B then drains through stage 2."""
    costs = unit_costs(PLACEMENT, ROWS)
    trained = replace(PLACEMENT, first_backward=0)
    assert simulate(build_1f1b(trained, ROWS), costs, ROWS).iteration_ms == 33.0
    assert simulate(build_1f1b(PLACEMENT, ROWS), costs, ROWS).iteration_ms == 29.0
    tuned = tune_zero_bubble(PLACEMENT, ROWS, costs, num_steps=50)
    assert simulate(tuned.schedule, costs, ROWS).iteration_ms == 27.0
    limits = step_limits(PLACEMENT, ROWS, costs, splits_gradients=True)
    assert (limits.ideal_ms, limits.bound_ms) == (16.0, 27.0)


def test_no_gradient_crosses_a_link_to_a_frozen_stage():
    ones = np.ones((4, 8))
    costs = StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)
    slow = Link(boundary_columns=(1, 1, 1), bytes_per_value=1, bytes_per_ms=1e9, latency_ms=0.5)
    schedule = build_1f1b(PLACEMENT, ROWS)
    text = lowered(schedule, ROWS).schedule.to_text()
    assert "2SEND_B" not in text
    assert "3SEND_B" in text
    # Three hops forward and eight round trips between stages 2 and 3 at most.
    assert simulate(schedule, costs, ROWS, link=slow).iteration_ms <= 27 + 1.5 + 8 * 1.0 + 3
