import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule import zb_kernel, zero_bubble
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import Link, StepCosts, simulate
from lightning_entrain.schedule.tables import cost_tables
from lightning_entrain.schedule.types import ActionKind, Placement, RowCounts, row_counts
from lightning_entrain.schedule.verify import verify
from lightning_entrain.schedule.zero_bubble import (
    Knobs,
    build_zero_bubble,
    tune_zero_bubble,
)
from lightning_entrain.workload.sizes import SampleSize

from .helpers import full_rows, lowered, random_rows, runs_blocking
from .test_simulate import random_costs, unit_costs


def texts(schedule):
    return [" ".join(map(str, own)) for own in schedule.ranks]


def test_golden_zb_h1():
    schedule = build_zero_bubble(Placement.one_per_rank(1, 2), full_rows(4))
    assert texts(schedule) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h1_of_equal_stages_is_near_its_bound():
    placement, rows = Placement.one_per_rank(5, 3), full_rows(32)
    costs = unit_costs(placement, rows)
    found = simulate(build_zero_bubble(placement, rows, costs), costs, rows)
    # The last stage cannot start before 7 forwards: at least (96 + 7) / 96.
    assert (96 + 7) / 96 <= found.iteration_ms / found.bottleneck_ms <= 1.08
    assert max(found.peak_live) == 8
    assert found.iteration_ms < simulate(build_1f1b(placement, rows), costs, rows).iteration_ms


@st.composite
def pipelines(draw):
    rng = random.Random(draw(st.integers(0, 2**32)))
    placement = Placement.one_per_rank(rng.randint(1, 4), rng.randint(1, 4))
    return placement, random_rows(rng, draw(st.integers(1, 8)), draw(st.integers(0, 1)))


@given(pipelines(), st.floats(3.5, 12.0), st.integers(0, 5))
@settings(deadline=None)
def test_every_tuned_order_verifies_within_its_memory(pipeline, max_bytes, seed):
    placement, rows = pipeline
    # Random sizes are at most 2; two neighbours fit, as deferral needs.
    costs = random_costs(seed, placement, rows, overhead_ms=0.1)
    tuned = tune_zero_bubble(
        placement, rows, costs, max_bytes=max_bytes + 0.5, num_steps=60, seed=seed
    )
    own_rows = tuned.reorder_rows(rows)
    program = lowered(tuned.schedule, own_rows)
    verify(program, own_rows)
    assert runs_blocking(program, own_rows)
    found = simulate(tuned.schedule, tuned.reorder_costs(costs), own_rows)
    assert max(found.peak_bytes) <= max_bytes + 0.5 + 1e-6
    assert ActionKind.B not in {a.kind for own in tuned.schedule.ranks for a in own}
    if rows.max_lag:
        assert tuned.order == tuple(range(rows.num_microbatches))
    plain = build_zero_bubble(placement, rows, costs, max_bytes=max_bytes + 0.5)
    verify(lowered(plain, rows), rows)


def test_tuning_beats_zb_h1_on_uneven_loads():
    rng = np.random.default_rng(3)
    placement, rows = Placement.one_per_rank(5, 3), full_rows(32)
    loads = 1 + 0.15 * rng.standard_normal((2, 32))
    costs = StepCosts.from_loads(placement, loads[0], loads[1], [0.2] * 5 + [0.3, 0.35, 0.35])
    start = simulate(build_zero_bubble(placement, rows, costs, max_bytes=9), costs, rows)
    tuned = tune_zero_bubble(placement, rows, costs, max_bytes=9, num_steps=2000)
    found = simulate(tuned.schedule, tuned.reorder_costs(costs), tuned.reorder_rows(rows))
    assert found.iteration_ms < 0.98 * start.iteration_ms
    assert sorted(tuned.order) == list(range(32))
    again = tune_zero_bubble(placement, rows, costs, max_bytes=9, num_steps=2000)
    assert again == tuned


def test_zero_bubble_with_deferral_splits_the_encoder_backward():
    segments = {(0, 0): 1, (0, 1): 1, (1, 1): 2}
    rows = RowCounts(
        encoder=(8, 8),
        segments=segments,
        llm=(5, 5),
        segment_patches={key: 4 * n for key, n in segments.items()},
    )
    schedule = build_zero_bubble(Placement.one_per_rank(1, 1), rows)
    assert texts(schedule)[0] == "0F0 0F1 0I0>0 0W0>0 0I0>1 0I1 0W0>1 0W1"
    verify(lowered(schedule, rows), rows)


@pytest.mark.parametrize(
    "placement", [Placement.one_per_rank(3, 2), Placement.contiguous(3, 2, 3)], ids=str
)
def test_kernel_time_is_the_simulators(placement):
    rng = np.random.default_rng(5)
    rows, num_ranks = full_rows(12), placement.num_ranks
    loads = 1 + 0.2 * rng.standard_normal((2, 12))
    costs = StepCosts.from_loads(placement, loads[0], loads[1], [0.3, 0.3, 0.4, 0.5, 0.5])
    link = Link(boundary_columns=(8,) * 4, bytes_per_value=2, bytes_per_ms=5000, latency_ms=0.01)
    tables = cost_tables(placement, rows, costs, max_bytes=None, link=link)
    knobs = Knobs.zb_h1(num_ranks)
    done = np.zeros((num_ranks, 36), dtype=np.int64)
    makespan = zb_kernel.evaluate(
        np.arange(12),
        zero_bubble._merge(tables, placement),
        np.full(num_ranks, 1 << 59),
        np.array(knobs.warmup),
        np.array(knobs.weight_delay),
        np.zeros_like(done),
        done,
        zb_kernel.STUCK,
    )
    schedule = build_zero_bubble(placement, rows, costs, link=link)
    found = simulate(schedule, costs, rows, link=link)
    predicted = makespan / (1 << 20) * costs.forward_ms.mean()
    assert found.iteration_ms == pytest.approx(predicted, rel=1e-5)


def test_compiled_and_interpreted_climbs_are_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    tables = np.zeros((7, 3, 6), dtype=np.int64)
    tables[:3] = rng.integers(500, 2000, (3, 3, 6))
    tables[5] = tables[6] = rng.integers(5, 10, (3, 6))
    start = Knobs.zb_h1(3)
    results = []
    for python in (False, True):
        if python:
            for name in ("list_order", "run_orders", "evaluate", "draw", "nudge", "climb"):
                function = getattr(zb_kernel, name)
                monkeypatch.setattr(zb_kernel, name, getattr(function, "py_func", function))
        order = np.arange(6)
        warmup, delay = np.array(start.warmup), np.array(start.weight_delay)
        caps = np.full(3, 30)
        best = zb_kernel.climb(order, tables, caps, warmup, delay, 200, True, 7)
        results.append((best, order.tolist(), warmup.tolist(), delay.tolist()))
    assert results[0] == results[1]
    assert results[0][0] < zb_kernel.STUCK


def test_memory_too_small_is_refused():
    placement, rows = Placement.one_per_rank(2, 2), full_rows(4)
    costs = unit_costs(placement, rows)
    assert build_zero_bubble(placement, rows, costs, max_bytes=1.0)
    with pytest.raises(ScheduleError, match=r"fits into max_bytes 0\.9"):
        build_zero_bubble(placement, rows, costs, max_bytes=0.9)
    with pytest.raises(ScheduleError, match="more than 0"):
        build_zero_bubble(placement, rows, costs, max_bytes=0.0)


def test_several_stages_on_a_rank_are_refused():
    with pytest.raises(ScheduleError, match="ascending ranks"):
        build_zero_bubble(Placement.v_shaped(2, 2), full_rows(4))


def test_reordering_an_assignment_is_the_same_as_reordering_its_rows():
    sizes = [
        SampleSize(grids=((1, 2, 2 * n),), num_text_tokens=n, num_label_tokens=1)
        for n in range(1, 7)
    ]
    replica = ReplicaAssignment(
        encoder=((0, 1), (2,), (3, 4), (5,)), llm=((1, 0), (2,), (3, 4), (5,))
    )
    rows = row_counts(replica, sizes)
    placement = Placement.one_per_rank(1, 1)
    tuned = tune_zero_bubble(placement, rows, random_costs(2, placement, rows), num_steps=50)
    assert tuned.order != (0, 1, 2, 3)
    assert row_counts(tuned.reorder_assignment(replica), sizes) == tuned.reorder_rows(rows)


def test_memory_may_differ_by_rank():
    placement, rows = Placement.one_per_rank(3, 1), full_rows(12)
    costs = unit_costs(placement, rows)
    caps = (5.0, 4.0, 3.0, 2.0)  # 1F1B's own, plus one
    tuned = tune_zero_bubble(placement, rows, costs, max_bytes=caps, num_steps=200)
    found = simulate(tuned.schedule, tuned.reorder_costs(costs), tuned.reorder_rows(rows))
    assert all(a <= b for a, b in zip(found.peak_bytes, caps, strict=True))
    even = tune_zero_bubble(placement, rows, costs, max_bytes=5.0, num_steps=200)
    assert simulate(even.schedule, costs, rows).iteration_ms < found.iteration_ms
    with pytest.raises(ScheduleError, match="4 numbers"):
        tune_zero_bubble(placement, rows, costs, max_bytes=(5.0, 4.0))


def test_weight_gradients_fill_gaps():
    knobs = Knobs(warmup=(3, 2, 1), weight_delay=(9, 9, 9))  # all W at the end, but for gaps
    schedule = build_zero_bubble(Placement.one_per_rank(1, 2), full_rows(4), knobs=knobs)
    assert texts(schedule) == [
        "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
        "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3",
    ]


def test_full_memory_brings_weight_gradients_forward():
    codes, ones = np.zeros(12, dtype=np.int64), np.ones(4, dtype=np.int64)
    num = zb_kernel.list_order(np.arange(4), ones, ones, 2, 3, 9, codes)
    names = " ".join(f"{'FIW'[code % 3]}{code // 3}" for code in codes[:num].tolist())
    assert names == "F0 F1 I0 W0 F2 I1 W1 F3 I2 I3 W2 W3"


@pytest.mark.parametrize("warmup", [(1,), (0, 1), (1, 1, 1)])
def test_knobs_that_do_not_fit_are_refused(warmup):
    knobs = Knobs(warmup=warmup, weight_delay=(0, 0))
    with pytest.raises(ScheduleError, match="per rank"):
        build_zero_bubble(Placement.one_per_rank(1, 1), full_rows(2), knobs=knobs)


def test_empty_step():
    rows = RowCounts(encoder=(0, 0), segments={}, llm=(0, 0))
    schedule = build_zero_bubble(Placement.one_per_rank(1, 1), rows)
    assert schedule.ranks == ((), ())
    none = RowCounts(encoder=(), segments={}, llm=())
    assert build_zero_bubble(Placement.one_per_rank(1, 1), none).ranks == ((), ())


def test_deferral_moves_backward_work_but_makes_none():
    rows = random_rows(random.Random(3), 8, 1)
    assert rows.max_lag == 1
    placement = Placement.one_per_rank(2, 1)
    costs = random_costs(3, placement, rows)
    tables = cost_tables(placement, rows, costs, max_bytes=10.0, link=None)
    exists = np.array([rows.encoder, rows.encoder, rows.llm]) > 0
    unit = (1 << 20) / costs.forward_ms.mean()
    for row, times in enumerate((costs.forward_ms, costs.input_ms, costs.weight_ms)):
        expected = (times * exists).sum(axis=1) * unit
        assert tables[row].sum(axis=1) == pytest.approx(expected, rel=1e-4)
    assert tables[6].sum(axis=1) == pytest.approx(tables[5].sum(axis=1), rel=1e-6)
