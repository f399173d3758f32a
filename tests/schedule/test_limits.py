import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.limits import step_limits
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.types import Placement

from .helpers import cases, full_rows
from .test_simulate import random_costs, unit_costs


@given(cases(), st.integers(0, 99))
@settings(deadline=None)
def test_no_schedule_beats_its_limits(case, seed):
    placement, rows = case
    costs = random_costs(seed, placement, rows)
    close = 1 - 1e-9
    fused = step_limits(placement, rows, costs, splits_gradients=False)
    split = step_limits(placement, rows, costs, splits_gradients=True)
    assert fused.ideal_ms * close <= fused.bottleneck_ms <= split.bound_ms / close
    assert split.bound_ms * close <= fused.bound_ms
    plain = simulate(build_1f1b(placement, rows), costs, rows)
    assert plain.iteration_ms >= fused.bound_ms * close
    assert plain.bottleneck_ms == pytest.approx(fused.bottleneck_ms)
    best = choose_schedule(placement, rows, costs, num_steps=20).simulation
    assert best.iteration_ms >= split.bound_ms * close


def test_known_limits():
    placement, rows = Placement.one_per_rank(2, 2), full_rows(10)
    costs = unit_costs(placement, rows)
    fused = step_limits(placement, rows, costs, splits_gradients=False)
    assert (fused.ideal_ms, fused.bottleneck_ms) == (30, 30)
    assert fused.bound_ms == 30 + 3 + 6  # the last stage: 3 forwards before, 3 backwards after
    split = step_limits(placement, rows, costs, splits_gradients=True)
    assert split.bound_ms == 33
    found = simulate(build_1f1b(placement, rows), costs, rows)
    assert found.iteration_ms == fused.bound_ms
    assert np.isclose(split.ideal_ms, costs.work_ms().mean())
