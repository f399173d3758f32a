import random

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule import replay
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.one_f_one_b import build_1f1b, build_forward_only
from lightning_entrain.schedule.simulate import Link, StepCosts, encode, simulate
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.schedule.types import ActionKind, Placement, RowCounts, Schedule
from lightning_entrain.schedule.verify import peak_live

from .helpers import cases, full_rows, lowered


def random_costs(seed, placement, rows, overhead_ms=0.0):
    rng = np.random.default_rng(seed)
    shape = placement.num_stages, rows.num_microbatches
    forward, inputs, weights, size = (rng.uniform(0.5, 2.0, shape) for _ in range(4))
    return StepCosts(
        forward_ms=forward,
        input_ms=inputs,
        weight_ms=weights,
        activation_bytes=size,
        overhead_ms=overhead_ms,
    )


def unit_costs(placement, rows):
    ones = np.ones((placement.num_stages, rows.num_microbatches))
    return StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)


def duration(action, costs, rows, placement):
    s, m = action.stage, action.microbatch
    table = {
        ActionKind.F: costs.forward_ms,
        ActionKind.I: costs.input_ms,
        ActionKind.W: costs.weight_ms,
        ActionKind.B: costs.input_ms + costs.weight_ms,
    }[action.kind]
    share = 1.0
    if action.target is not None and s < placement.num_encoder_stages:
        share = rows.segment_patches[m, action.target] / rows.encoder[m]
    return table[s, m] * share + costs.overhead_ms


def check_events(simulation, costs, rows):
    """Each action starts exactly when its rank is free and its inputs are there."""
    schedule = simulation.schedule
    graph = StepGraph(schedule.placement, rows)
    made, events = {}, list(simulation.timeline.rows)
    for row in events:
        for edge in graph.outputs(row.action):
            made[edge] = row.end_ms
    free = [0.0] * len(schedule.ranks)
    for row in events:
        inputs = [made[edge] for edge in graph.inputs(row.action)]
        assert row.start_ms == max([free[row.rank], *inputs])
        expected = duration(row.action, costs, rows, schedule.placement)
        assert row.end_ms - row.start_ms == pytest.approx(expected)
        free[row.rank] = row.end_ms
    lists = [[r.action for r in events if r.rank == rank] for rank in range(len(schedule.ranks))]
    assert tuple(map(tuple, lists)) == schedule.ranks


@given(cases())
@settings(deadline=None)
def test_every_event_respects_its_dependencies(case):
    placement, rows = case
    for split in (False, True):
        schedule = build_1f1b(placement, rows, split_backward=split)
        costs = random_costs(1, placement, rows, overhead_ms=0.125)
        found = simulate(schedule, costs, rows)
        check_events(found, costs, rows)
        assert found.iteration_ms == found.timeline.iteration_ms
        assert found.busy_ms == pytest.approx(found.timeline.busy_ms())
        assert found.bubble_ratio == pytest.approx(found.timeline.bubble_ratio)
        live = [
            sum(found.peak_live[s] for s in placement.stages_of(r))
            for r in range(len(found.busy_ms))
        ]
        assert all(a <= b for a, b in zip(peak_live(schedule, rows), live, strict=True))
        if placement.num_ranks == placement.num_stages:
            ranks = placement.stage_to_rank
            assert tuple(peak_live(schedule, rows)[r] for r in ranks) == found.peak_live


@pytest.mark.parametrize(("num_stages", "num"), [(2, 1), (4, 3), (8, 32)])
def test_1f1b_of_equal_stages_takes_the_known_time(num_stages, num):
    placement = Placement.one_per_rank(1, num_stages - 1)
    rows = full_rows(num)
    found = simulate(build_1f1b(placement, rows), unit_costs(placement, rows), rows)
    assert found.iteration_ms == 3 * (num + num_stages - 1)
    assert found.bottleneck_ms == 3 * num
    assert found.bubble_ratio == pytest.approx((num_stages - 1) / (num + num_stages - 1))
    assert found.peak_live == tuple(min(num_stages - s, num) for s in range(num_stages))


def test_forward_only_holds_one_microbatch():
    placement, rows = Placement.one_per_rank(2, 2), full_rows(5)
    found = simulate(build_forward_only(placement, rows), unit_costs(placement, rows), rows)
    assert found.iteration_ms == 5 + 3
    assert found.peak_live == (1, 1, 1, 1)
    assert found.peak_bytes == (1, 1, 1, 1)


def test_transfers_take_latency_and_bandwidth_and_follow_each_other():
    placement = Placement.one_per_rank(1, 1)
    rows = RowCounts(encoder=(8, 4), segments={(0, 0): 2, (1, 1): 1}, llm=(9, 9))
    # 2 rows x 10 columns x 4 bytes / 8 bytes per ms = 10 ms, 1 row = 5 ms, each + 3 ms latency.
    link = Link(boundary_columns=(10,), bytes_per_value=4, bytes_per_ms=8, latency_ms=3)
    found = simulate(build_1f1b(placement, rows), unit_costs(placement, rows), rows, link=link)
    times = {str(r.action): (r.start_ms, r.end_ms) for r in found.timeline.rows}
    assert times["0F0"] == (0, 1)
    assert times["1F0"] == (14, 15)
    # The second message waits for the first: 14 + 3 + 5.
    assert times["0F1"] == (1, 2)
    assert times["1F1"] == (22, 23)
    assert times["1B0"] == (15, 17)
    assert times["0B0"] == (17 + 13, 32)


def test_hand_offs_inside_a_rank_take_no_time():
    rows = full_rows(3)
    placement = Placement.colocated(1, 1, 1)
    link = Link(boundary_columns=(10,), bytes_per_value=4, bytes_per_ms=8, latency_ms=3)
    found = simulate(build_1f1b(placement, rows), unit_costs(placement, rows), rows, link=link)
    assert found.iteration_ms == found.bottleneck_ms == 3 * 2 * 3


def test_peak_bytes_count_what_is_alive():
    placement, rows = Placement.one_per_rank(1, 1), full_rows(3)
    ones = np.ones((2, 3))
    size = np.array([[5.0, 7.0, 1.0], [2.0, 3.0, 4.0]])
    costs = StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones, activation_bytes=size)
    found = simulate(build_1f1b(placement, rows), costs, rows)
    assert found.peak_bytes == (12.0, 4.0)  # 0F0 0F1 | 0B0 0F2 ...; one at a time on the second


def test_a_deferred_microbatch_waits_for_its_encoder():
    rows = RowCounts(encoder=(8, 0), segments={(0, 1): 2}, llm=(0, 5))
    placement = Placement.one_per_rank(1, 1)
    found = simulate(build_1f1b(placement, rows), unit_costs(placement, rows), rows)
    times = {str(r.action): (r.start_ms, r.end_ms) for r in found.timeline.rows}
    assert times == {"0F0": (0, 1), "1F1": (1, 2), "1B1": (2, 4), "0B0": (4, 6)}


def test_segments_free_their_share_of_the_memory():
    rows = RowCounts(
        encoder=(8, 8),
        segments={(0, 0): 1, (0, 1): 1, (1, 1): 2},
        llm=(3, 3),
        segment_patches={(0, 0): 2, (0, 1): 6, (1, 1): 8},
    )
    schedule = Schedule.from_text(
        "schedule by_hand\nencoder_stages 1\nllm_stages 1\nstage_to_rank 0 1\n"
        "rank 0: 0F0 0B0>0 0F1 0B0>1 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    )
    costs = unit_costs(schedule.placement, rows)
    found = simulate(schedule, costs, rows)
    assert found.peak_bytes == (1.75, 1.0)  # a quarter of microbatch 0 is gone before F1
    assert found.peak_live == (2, 1)


def test_costs_from_loads():
    placement = Placement.one_per_rank(2, 1)
    costs = StepCosts.from_loads(
        placement, [1.0, 3.0], [4.0, 0.0], [0.25, 0.75, 1.0], input_factor=1.15, weight_factor=0.85
    )
    assert costs.forward_ms.tolist() == [[0.25, 0.75], [0.75, 2.25], [4.0, 0.0]]
    assert costs.input_ms == pytest.approx(costs.forward_ms * 1.15)
    assert costs.weight_ms == pytest.approx(costs.forward_ms * 0.85)
    assert costs.activation_bytes.tolist() == [[0.5, 1.5], [0.5, 1.5], [2.0, 0.0]]
    shared = Placement(num_encoder_stages=1, num_llm_stages=1, stage_to_rank=(0, 0))
    both = StepCosts.from_loads(shared, [1.0, 3.0], [4.0, 4.0], [1.0, 1.0])
    assert both.activation_bytes == pytest.approx(np.array([[1, 3], [4, 4]]) / 6)
    assert costs.work_ms() == pytest.approx([3.0, 9.0, 12.0])


def test_segments_take_their_share_of_the_backward():
    rows = RowCounts(
        encoder=(8, 0),
        segments={(0, 0): 1, (0, 1): 1},
        llm=(3, 3),
        segment_patches={(0, 0): 2, (0, 1): 6},
    )
    placement = Placement.one_per_rank(1, 1)
    schedule = build_1f1b(placement, rows, split_backward=True)
    found = simulate(schedule, unit_costs(placement, rows), rows)
    times = {str(r.action): r.duration_ms for r in found.timeline.rows if r.rank == 0}
    assert times == {"0F0": 1.0, "0B0>0": 0.5, "0B0>1": 1.5}


@pytest.mark.parametrize("case_seed", range(5))
def test_compiled_and_interpreted_give_the_same(case_seed, monkeypatch):
    rng = random.Random(case_seed)
    placement, rows = Placement.one_per_rank(2, 2), full_rows(rng.randint(2, 5))
    schedule = build_1f1b(placement, rows)
    costs = random_costs(case_seed, placement, rows)
    found = simulate(schedule, costs, rows)
    offsets, stage, kind, microbatch, target = encode(schedule)
    tables = [costs.forward_ms, costs.input_ms + costs.weight_ms]
    durations = np.stack(tables)[kind, stage, microbatch]
    start, end = np.zeros(len(stage)), np.zeros(len(stage))
    none = np.zeros((4, rows.num_microbatches, 2))
    for name in ("arrival_of", "deliver"):
        function = getattr(replay, name)
        monkeypatch.setattr(replay, name, getattr(function, "py_func", function))
    python = getattr(replay.replay, "py_func", replay.replay)
    python(
        offsets,
        stage,
        kind,
        microbatch,
        target,
        durations,
        2,
        np.arange(4),
        np.ones((rows.num_microbatches, 1), dtype=bool),
        none,
        none,
        start,
        end,
    )
    assert [row.end_ms for row in found.timeline.rows] == end.tolist()
    assert [row.start_ms for row in found.timeline.rows] == start.tolist()


def test_bad_input_is_refused():
    placement, rows = Placement.one_per_rank(1, 1), full_rows(2)
    schedule = build_1f1b(placement, rows)
    costs = unit_costs(placement, rows)
    with pytest.raises(ScheduleError, match="before it is lowered"):
        simulate(lowered(schedule, rows).schedule, costs, rows)
    with pytest.raises(ScheduleError, match="shape"):
        simulate(schedule, unit_costs(placement, full_rows(3)), rows)
    with pytest.raises(ScheduleError, match="negative or not finite"):
        StepCosts(forward_ms=-np.ones((2, 2)), input_ms=np.ones((2, 2)), weight_ms=np.ones((2, 2)))
    with pytest.raises(ScheduleError, match="shapes"):
        StepCosts(forward_ms=np.ones((2, 2)), input_ms=np.ones((2, 3)), weight_ms=np.ones((2, 2)))


def test_lists_that_wait_for_each_other_are_refused():
    placement, rows = Placement.one_per_rank(1, 1), full_rows(2)
    good = build_1f1b(placement, rows)
    crossed = type(good)(
        name="crossed",
        placement=placement,
        ranks=(
            (good.ranks[0][0], good.ranks[0][2], good.ranks[0][1], good.ranks[0][3]),
            (good.ranks[1][2], good.ranks[1][0], good.ranks[1][1], good.ranks[1][3]),
        ),
    )
    with pytest.raises(ScheduleError, match="stops after 1 of 8"):
        simulate(crossed, unit_costs(placement, rows), rows)


def test_replicas_side_by_side():
    placement, rows = Placement.one_per_rank(1, 1), full_rows(2)
    one = simulate(build_1f1b(placement, rows), unit_costs(placement, rows), rows).timeline
    both = Timeline.side_by_side([one, one])
    assert both.num_ranks == 4
    assert both.iteration_ms == one.iteration_ms
    assert both.bubble_ratio == pytest.approx(one.bubble_ratio)
    assert {row.rank for row in both.rows} == {0, 1, 2, 3}
    assert Timeline(rows=(), num_ranks=2).bubble_ratio == 0
