import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule import list_kernel, polish_kernel
from lightning_entrain.schedule.list_schedule import tune_list_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import Placement
from lightning_entrain.schedule.verify import verify
from lightning_entrain.schedule.zero_bubble import tune_zero_bubble

from .helpers import cases, full_rows, lowered, runs_blocking
from .test_simulate import random_costs, unit_costs


def run(tuned, costs, rows):
    return simulate(tuned.schedule, tuned.reorder_costs(costs), tuned.reorder_rows(rows))


@given(cases(), st.floats(0.0, 8.0), st.integers(0, 5))
@settings(deadline=None)
def test_every_list_schedule_verifies_within_its_memory(case, spare, seed):
    placement, rows = case
    costs = random_costs(seed, placement, rows, overhead_ms=0.1)
    # Two microbatches on all stages of the fullest rank: enough for any deferral.
    stages = max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    max_bytes = 2.0 * 2 * stages + spare
    tuned = tune_list_schedule(placement, rows, costs, max_bytes=max_bytes, num_steps=20, seed=seed)
    own_rows = tuned.reorder_rows(rows)
    program = lowered(tuned.schedule, own_rows)
    verify(program, own_rows)
    assert runs_blocking(program, own_rows)
    assert max(run(tuned, costs, rows).peak_bytes) <= max_bytes + 1e-6


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None)
def test_zero_bubble_with_a_shared_boundary_verifies(encoder, llm, seed):
    placement, rows = Placement.shared_boundary(encoder, llm), full_rows(6)
    costs = random_costs(seed, placement, rows)
    tuned = tune_zero_bubble(placement, rows, costs, max_bytes=8, num_steps=40)
    own_rows = tuned.reorder_rows(rows)
    verify(lowered(tuned.schedule, own_rows), own_rows)
    assert max(run(tuned, costs, rows).peak_bytes) <= 8 + 1e-6


def test_v_shape_of_equal_chunks():
    placement, rows = Placement.v_shaped(8, 8), full_rows(32)
    half = np.full((16, 32), 0.5)
    costs = StepCosts(forward_ms=half, input_ms=half, weight_ms=half, activation_bytes=half)
    found = run(tune_list_schedule(placement, rows, costs, max_bytes=9, num_steps=0), costs, rows)
    assert found.iteration_ms / found.bottleneck_ms <= 1.05
    assert max(found.peak_bytes) <= 9
    assert found.iteration_ms < simulate(build_1f1b(placement, rows), costs, rows).iteration_ms


def test_small_differences_between_microbatches_cost_little():
    rng = np.random.default_rng(0)
    placement, rows = Placement.v_shaped(8, 8), full_rows(32)
    half = np.full((16, 1), 0.5) * (1 + 0.01 * rng.standard_normal(32))
    costs = StepCosts(forward_ms=half, input_ms=half, weight_ms=half, activation_bytes=half)
    found = run(tune_list_schedule(placement, rows, costs, max_bytes=9, num_steps=100), costs, rows)
    assert found.iteration_ms / found.bottleneck_ms <= 1.06


def test_memory_too_small_is_refused():
    placement, rows = Placement.colocated(2, 2, 2), full_rows(4)
    costs = unit_costs(placement, rows)
    assert tune_list_schedule(placement, rows, costs, max_bytes=2.0, num_steps=0)
    with pytest.raises(ScheduleError, match="fits into max_bytes"):
        tune_list_schedule(placement, rows, costs, max_bytes=1.9, num_steps=0)
    with pytest.raises(ScheduleError, match="profile"):
        tune_list_schedule(placement, rows, costs, profile=[1.0])


def test_compiled_and_interpreted_are_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    tables = np.zeros((7, 4, 5), dtype=np.int64)
    tables[:3] = rng.integers(500, 2000, (3, 4, 5))
    tables[5] = tables[6] = rng.integers(5, 10, (4, 5))
    results = []
    for python in (False, True):
        if python:
            for name in ("fits", "choose", "run_list", "rerun", "evaluate_list", "draw", "nudge"):
                function = getattr(list_kernel, name)
                monkeypatch.setattr(list_kernel, name, getattr(function, "py_func", function))
        climb = list_kernel.climb_list
        if python:
            climb = getattr(climb, "py_func", climb)
        order, warmup, delay = np.arange(5), np.full(4, 4), np.arange(4)
        place = np.array([0, 1, 1, 0])
        best = climb(place, 2, order, tables, tables, np.full(2, 60), warmup, delay, 40, True, 3)
        results.append((best, order.tolist(), warmup.tolist(), delay.tolist()))
    assert results[0] == results[1]
    assert results[0][0] < list_kernel.STUCK


def test_polishing_never_loses_and_keeps_lists_legal():
    rng = np.random.default_rng(2)
    num, place = 8, np.array([0, 1, 2, 2, 1, 0])
    tables = np.zeros((7, 6, num), dtype=np.int64)
    tables[:3] = rng.integers(500, 2000, (3, 6, num))
    tables[5] = tables[6] = rng.integers(5, 10, (6, num))
    order, caps = np.arange(num), np.full(3, 60)
    codes = np.full((3, 18 * num), -1)
    done = codes.copy()
    warmup, delay = np.full(6, num), np.full(6, num)
    start = list_kernel.evaluate_list(
        place, order, tables, tables, caps, warmup, delay, codes, done, list_kernel.STUCK
    )
    codes[:] = done
    best = polish_kernel.polish(place, order, tables, caps, codes, done, 4000, False, 1)
    assert best < start
    for rank, own in enumerate(done):
        length = int((own >= 0).sum())
        assert length == 2 * 3 * num
        assert polish_kernel.is_legal(own, length, order, tables, caps[rank])
    swapped = done[0].copy()
    swapped[0], swapped[1] = swapped[1], swapped[0]
    polish_kernel.move(swapped, 0, length - 1)
    assert not polish_kernel.is_legal(swapped, length, order, tables, caps[0])


def test_a_rank_keeps_room_for_what_is_under_way():
    # Two stages per rank, room for two activations: without a reserve the first stage's
    # forwards would fill it and nothing could come back.
    tables = np.ones((7, 4, 6), dtype=np.int64)
    tables[3:5] = 0
    place, order, caps = np.array([0, 1, 0, 1]), np.arange(6), np.full(2, 2)
    done = np.full((2, 36), -1)
    warmup, delay = np.full(4, 6), np.full(4, 0)
    makespan = list_kernel.run_list(
        place, 2, order, tables, caps, warmup, delay, done, list_kernel.STUCK - 1
    )
    assert makespan < list_kernel.STUCK
    assert (done >= 0).sum() == 3 * 4 * 6


def test_rerun_moves_weight_gradients_into_gaps():
    tables = np.ones((7, 2, 3), dtype=np.int64)
    tables[3:5] = 0
    tables[1, 1] = 4  # a slow I on the last stage leaves gaps on the first
    place, order = np.array([0, 1]), np.arange(3)
    late = [[0, 3, 6, 1, 4, 7, 2, 5, 8], [9, 10, 12, 13, 15, 16, 11, 14, 17]]
    codes = np.array(late)
    done = codes.copy()
    list_kernel.rerun(place, order, tables, codes, done, list_kernel.STUCK - 1)
    assert done[0].tolist() == [0, 3, 6, 1, 2, 4, 5, 7, 8]
    assert done[1].tolist() == late[1]
