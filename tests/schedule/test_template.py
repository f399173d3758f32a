import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule import (
    list_kernel,
    polish_kernel,
    ramp_kernel,
    template,
    template_kernel,
)
from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.template import find_template, follow_template
from lightning_entrain.schedule.template_search import MEAN_LOAD, SearchState, TemplateSearch
from lightning_entrain.schedule.types import Placement
from lightning_entrain.schedule.verify import verify

from .helpers import full_rows, lowered, random_placement, random_rows
from .test_simulate import random_costs

# Chunks of whole layers: encoder's first, the head last.
V_MS = [0.3, 0.7, 0.7, 0.8, 0.7, 0.7, 0.7, 0.5, 0.6, 0.3, 0.3, 0.3, 0.15, 0.3, 0.3, 0.7]


def loads_of(placement, profile, stage_ms):
    return StepCosts.from_loads(placement, profile, profile, stage_ms)


def run(tuned, costs, rows):
    return simulate(tuned.schedule, tuned.reorder_costs(costs), tuned.reorder_rows(rows))


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 1), st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_followed_template_verifies_within_its_memory(seed, num, max_lag, ramp):
    rng = random.Random(seed)
    placement, rows = random_placement(rng), random_rows(rng, num, max_lag)
    ones = np.ones((3, placement.num_stages))
    found = find_template(placement, ones, num, max_live=None, ramp=ramp, num_steps=240)
    assert sum(found.profile) == pytest.approx(num)
    assert found.over_bottleneck >= 1 - 1e-9
    stages = max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    costs = random_costs(seed % 1000, placement, rows, overhead_ms=0.1)
    max_bytes = 2.0 * 3 * stages
    try:
        tuned = follow_template(found, rows, costs, max_bytes=max_bytes, num_steps=20)
    except ScheduleError:
        return
    own_rows = tuned.reorder_rows(rows)
    verify(lowered(tuned.schedule, own_rows), own_rows)
    assert max(run(tuned, costs, rows).peak_bytes) <= max_bytes + 1e-6


def test_a_template_makes_a_v_of_uneven_chunks_fast():
    placement, num = Placement.v_shaped(8, 8), 24
    rows = full_rows(num)
    plain = choose_schedule(
        placement, rows, loads_of(placement, [1.0] * num, V_MS), max_bytes=9, num_steps=1000
    )
    limit = plain.simulation.bottleneck_ms
    found = find_template(placement, [V_MS] * 3, num, max_live=9, ramp=True, num_steps=60_000)
    costs = loads_of(placement, found.profile, V_MS)
    ran = run(follow_template(found, rows, costs, max_bytes=9, num_steps=0), costs, rows)
    assert ran.bottleneck_ms == pytest.approx(limit)
    assert ran.iteration_ms / limit == pytest.approx(found.over_bottleneck, rel=2e-3)
    assert max(ran.peak_bytes) <= 9
    assert ran.iteration_ms < 1.055 * limit < plain.simulation.iteration_ms - 0.01 * limit
    # All machines search alike: each rank of a job may find the template by itself.
    digest = hashlib.sha256(repr((found.profile, found.codes)).encode()).hexdigest()
    assert digest[:16] == "464716c1a150fc1e"


@pytest.mark.parametrize(
    "placement", [Placement.one_per_rank(2, 2), Placement.shared_boundary(3, 2)]
)
def test_neighbouring_stages_start_from_zero_bubble(placement):
    stage_ms = [[1.0, 0.9, 0.5, 0.5, 1.1][: placement.num_stages]] * 3
    reports = []
    found = find_template(
        placement, stage_ms, 16, max_live=5, ramp=True, num_steps=9000, progress=reports.append
    )
    assert found.over_bottleneck < 1.06
    assert reports == sorted(reports)
    assert reports[-1] == 1.0


def test_a_start_from_zero_bubble_is_timed_stage_by_stage():
    placement, num = Placement.shared_boundary(3, 2), 8
    stage_ms = [[1.0, 0.9, 0.5, 0.5, 1.1]] * 3
    search = TemplateSearch(placement, stage_ms, 1e13, 0.3, None)
    profile = np.full(num, MEAN_LOAD, dtype=np.int64)
    state = SearchState(next(search.starts()), profile, search.no_codes(num))
    search.zero_bubble(state, num_steps=20, seed=0)
    tables = np.zeros((7, placement.num_stages, num), dtype=np.int64)
    template_kernel.spread(search.base, search.overhead, profile, tables)
    codes, done = state.codes.copy(), state.codes.copy()
    order = np.arange(num, dtype=np.int64)
    ran = list_kernel.rerun(search.rank_of, order, tables, codes, done, search.stuck - 1)
    assert state.makespan == ran
    assert ran >= search.bottleneck(num)


def test_a_choice_with_a_template_is_never_worse_than_one_without():
    rng = np.random.default_rng(0)
    for placement in (Placement.one_per_rank(2, 2), Placement.v_shaped(2, 2)):
        found = find_template(placement, [[0.5, 0.4, 0.6, 0.5]] * 3, 12, max_live=5, num_steps=6000)
        for spread in (0.02, 0.5):
            rows = full_rows(12)
            loads = np.maximum(1 + spread * rng.standard_normal((2, 12)), 0.1)
            costs = StepCosts.from_loads(placement, *loads, [0.5, 0.4, 0.6, 0.5])
            with_it, without = (
                choose_schedule(placement, rows, costs, max_bytes=5, template=x, num_steps=200)
                for x in (found, None)
            )
            assert "template" in with_it.iteration_ms
            assert with_it.simulation.iteration_ms <= without.simulation.iteration_ms
            assert max(with_it.simulation.peak_bytes) <= 5 + 1e-6


def test_a_template_for_other_steps_is_left_out():
    placement, rows = Placement.one_per_rank(2, 2), full_rows(6)
    found = find_template(placement, [[1.0] * 4] * 3, 5, max_live=5, num_steps=240)
    costs = random_costs(0, placement, rows)
    assert "template" not in choose_schedule(placement, rows, costs, template=found).iteration_ms
    with pytest.raises(ScheduleError, match="6 microbatches"):
        follow_template(found, rows, costs)
    with pytest.raises(ScheduleError, match="F, I and W of 4 stages"):
        find_template(placement, [[1.0] * 3] * 3, 5, max_live=5)
    with pytest.raises(ScheduleError, match="raise the memory"):
        find_template(placement, [[1.0] * 4] * 3, 5, max_live=0.5, num_steps=240)


def test_lists_are_refitted_to_less_memory():
    num = 6
    tables = np.ones((7, 2, num), dtype=np.int64)
    # F of all microbatches first: 12 held at once.
    codes = [[(s * num + p) * 3 + kind for p in range(num)] for kind in range(3) for s in (0, 1)]
    own = np.array(codes).ravel()
    for cap in (12, 5, 0):
        fitted = own.copy()
        assert polish_kernel.refit(fitted, len(own), np.arange(num), tables, cap) == (cap > 0)
        if cap > 0:
            assert polish_kernel.is_legal(fitted, len(own), np.arange(num), tables, cap)
            assert (fitted == own).all() == (cap == 12)


def test_compiled_and_interpreted_searches_are_the_same(monkeypatch):
    placement = Placement.v_shaped(2, 2)
    results = []
    for python in (False, True):
        if python:
            for module in (template_kernel, polish_kernel, ramp_kernel):
                for name in dir(module):
                    function = getattr(module, name)
                    if hasattr(function, "py_func"):
                        monkeypatch.setattr(module, name, function.py_func)
        results.append(
            template.find_template(
                placement, [[1.0, 0.8, 0.5, 0.7]] * 3, 8, max_live=4, ramp=True, num_steps=360
            )
        )
    assert results[0] == results[1]
    assert results[0].profile != (1.0,) * 8
