"""Idle time is split into three parts that add up; each planted cause lands in its part."""

import pytest

from lightning_entrain.observe.idle import durations_of, split_idle
from lightning_entrain.observe.step_trace import RankRecord, ReplicaTrace, StepTrace, join_records
from lightning_entrain.schedule.choose import FAMILIES, choose_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Action, Placement, RowCounts

PLACEMENT = Placement.one_per_rank(1, 1)
ROWS = RowCounts(encoder=(8, 8), segments={(0, 0): 2, (1, 1): 2}, llm=(5, 5))


def replica(*spans):
    """A replica of two ranks whose actions ran at these times: (rank, action, start, end)."""
    schedule = build_1f1b(PLACEMENT, ROWS)
    rows = tuple(TimelineRow(rank, Action.parse(a), start, end) for rank, a, start, end in spans)
    assert sorted(str(row.action) for row in rows) == sorted(
        str(a) for own in schedule.ranks for a in own
    )
    return ReplicaTrace(schedule=schedule, rows=ROWS, timeline=Timeline(rows=rows, num_ranks=2))


EVEN = [
    (0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0B0", 3, 4), (0, "0B1", 5, 6),
    (1, "1F0", 1, 2), (1, "1B0", 2, 3), (1, "1F1", 3, 4), (1, "1B1", 4, 5),
]  # fmt: skip


def check_sums(trace, idle):
    """Busy and the parts add up to the step on every rank, and no part is negative."""
    busy = trace.timeline.busy_ms()
    for rank, own in enumerate(idle.ranks):
        assert own.busy_ms == pytest.approx(busy[rank], abs=1e-9)
        assert own.busy_ms + own.idle_ms == pytest.approx(idle.step_ms, abs=1e-9)
        assert min(own.fill_drain_ms, own.imbalance_ms, own.communication_ms) >= 0
    parts = idle.fill_drain_ratio + idle.imbalance_ratio + idle.communication_ratio
    assert parts == pytest.approx(idle.bubble_ratio, abs=1e-12)


def split(*replicas, may_split=False):
    trace = StepTrace(replicas=tuple(replicas), planning_ms=0.0)
    idle = split_idle(trace, may_split=may_split)
    check_sums(trace, idle)
    return idle


def test_equal_work_without_transfer_time_only_fills_and_drains():
    idle = split(replica(*EVEN))
    assert idle.step_ms == 6
    assert [(r.fill_drain_ms, r.imbalance_ms, r.communication_ms) for r in idle.ranks] == [
        (2.0, 0.0, 0.0),
        (2.0, 0.0, 0.0),
    ]
    assert idle.bubble_ratio == pytest.approx(2 / 6)


def test_a_slow_transfer_is_communication():
    """The first activation arrives 3 ms late; all that follows is later by as much."""
    late = [(r, a, s + 3, e + 3) if s >= 1 and a != "0F1" else (r, a, s, e) for r, a, s, e in EVEN]
    idle = split(replica(*late))
    assert [r.communication_ms for r in idle.ranks] == [3.0, 3.0]
    assert [r.fill_drain_ms for r in idle.ranks] == [2.0, 2.0]
    assert idle.imbalance_ratio == 0.0


def test_a_slow_stage_is_imbalance_on_the_other():
    """The LLM takes 3 ms per action: the encoder waits, and not for transfers."""
    spans = [
        (0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0B0", 7, 8), (0, "0B1", 13, 14),
        (1, "1F0", 1, 4), (1, "1B0", 4, 7), (1, "1F1", 7, 10), (1, "1B1", 10, 13),
    ]  # fmt: skip
    idle = split(replica(*spans))
    encoder, llm = idle.ranks
    assert encoder.communication_ms == llm.communication_ms == 0.0
    # With all 16 ms of work equal (2 ms per action) the step would take 12 ms, 4 of them idle.
    assert encoder.fill_drain_ms == pytest.approx(4.0)
    assert encoder.imbalance_ms == pytest.approx(6.0)
    assert (llm.fill_drain_ms, llm.imbalance_ms) == (pytest.approx(2.0), 0.0)


def test_waiting_for_a_slower_replica_is_imbalance():
    slow = [(r, a, 2 * s, 2 * e) for r, a, s, e in EVEN]
    idle = split(replica(*EVEN), replica(*slow))
    assert idle.step_ms == 12
    assert [r.imbalance_ms for r in idle.ranks] == [6.0, 6.0, 0.0, 0.0]


def test_ranks_of_a_host_share_its_clock_and_hosts_are_aligned():
    whole = replica(*EVEN)
    records = [
        RankRecord(
            replica=number,
            host=host,
            began_at=began,
            timeline=Timeline(
                rows=tuple(row for row in whole.timeline.rows if row.rank == rank), num_ranks=2
            ),
            plan=(whole.schedule, whole.rows) if rank == 0 else None,
            planning_ms=float(number),
        )
        for number, host, rank, began in [
            (0, "a", 0, 100.0),
            (0, "a", 1, 100.5),
            (1, "b", 0, 7.25),
            (1, "b", 1, 7.0),
        ]
    ]
    trace = join_records(records)
    firsts = [
        min(row.start_ms for row in own.timeline.rows if row.rank == rank)
        for own in trace.replicas
        for rank in (0, 1)
    ]
    assert firsts == pytest.approx([0.0, 501.0, 250.0, 1.0])
    assert trace.planning_ms == 1.0
    assert len(durations_of(trace.replicas[1])) == 8


def test_equal_work_means_equally_busy_ranks_also_where_one_has_more_stages():
    """Rank 0 holds two of three stages; its four actions then take half as long as rank 1's two."""
    placement = Placement(num_encoder_stages=2, num_llm_stages=1, stage_to_rank=(0, 0, 1))
    rows = RowCounts(encoder=(8,), segments={(0, 0): 2}, llm=(5,))
    schedule = build_1f1b(placement, rows)
    spans = {
        "0F0": (0, 1),
        "1F0": (1, 2),
        "2F0": (2, 4),
        "2B0": (4, 6),
        "1B0": (6, 7),
        "0B0": (7, 8),
    }
    timeline = Timeline(
        rows=tuple(
            TimelineRow(rank, action, *map(float, spans[str(action)]))
            for rank, own in enumerate(schedule.ranks)
            for action in own
        ),
        num_ranks=2,
    )
    idle = split(ReplicaTrace(schedule=schedule, rows=rows, timeline=timeline))
    # Both ranks are busy 4 ms of 8, one after the other, as with equal work: nothing is imbalance.
    assert [r.fill_drain_ms for r in idle.ranks] == pytest.approx([4.0, 4.0])
    assert idle.imbalance_ratio == pytest.approx(0.0)


def as_scheduled(schedule, costs, rows):
    """A replica that ran exactly as simulated."""
    timeline = simulate(schedule, costs, rows).timeline
    return ReplicaTrace(schedule=schedule, rows=rows, timeline=timeline)


def chosen_for(encoder_loads, llm_loads, families=FAMILIES, may_split=None):
    """A step of these microbatches on two ranks, by the fastest schedule, without transfers."""
    count = len(encoder_loads)
    rows = RowCounts(
        encoder=(8,) * count, segments={(k, k): 2 for k in range(count)}, llm=(5,) * count
    )
    factors = [(1 / 3,) * 3] * 2
    costs = StepCosts.from_loads(
        PLACEMENT, encoder_loads, llm_loads, (1.0, 1.0), stage_factors=factors
    )
    choice = choose_schedule(PLACEMENT, rows, costs, families=families, seed=0)
    may_split = len(families) > 1 if may_split is None else may_split
    return split(as_scheduled(choice.tuned.schedule, costs, rows), may_split=may_split)


def test_a_schedule_chosen_for_uneven_work_does_not_make_imbalance_fill_and_drain():
    """For these microbatches whole B is best, for equal ones it is not."""
    loads = [58.7, 1.3, 58.7, 1.3], [12.4, 12.4, 93.1, 2.1]
    even, uneven = chosen_for([30.0] * 4, [30.0] * 4), chosen_for(*loads)
    assert uneven.imbalance_ratio > uneven.fill_drain_ratio
    assert uneven.fill_drain_ratio < even.fill_drain_ratio
    whole, chosen = (chosen_for(*loads, ("1f1b",), may_split=s) for s in (False, True))
    assert chosen.bubble_ratio == whole.bubble_ratio
    assert chosen.fill_drain_ratio < 0.6 * whole.fill_drain_ratio


@pytest.mark.parametrize("families", [FAMILIES, ("1f1b",)])
def test_uneven_microbatches_are_imbalance_whatever_schedule_was_chosen_for_them(families):
    """Both stages have as much work in all; only the microbatches differ."""
    even = chosen_for([30.0] * 4, [30.0] * 4, families)
    uneven = chosen_for([6.0, 72.0, 12.0, 30.0], [72.0, 6.0, 30.0, 12.0], families)
    assert even.imbalance_ratio == pytest.approx(0.0, abs=1e-9)
    assert even.fill_drain_ratio == pytest.approx(even.bubble_ratio)
    assert even.fill_drain_ratio < (0.15 if len(families) > 1 else 0.21)
    assert uneven.communication_ratio == pytest.approx(0.0, abs=1e-9)
    assert uneven.imbalance_ratio > 0.07
    # It fills and drains for as long as with equal work.
    assert uneven.fill_drain_ratio * uneven.step_ms == pytest.approx(
        even.fill_drain_ratio * even.step_ms
    )


def test_an_unequal_stage_is_imbalance_under_a_chosen_schedule():
    idle = chosen_for([30.0] * 4, [90.0] * 4)
    encoder, llm = idle.ranks
    assert encoder.imbalance_ms > encoder.fill_drain_ms
    assert llm.imbalance_ms == pytest.approx(0.0)
