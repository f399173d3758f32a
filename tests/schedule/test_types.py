import pytest
from hypothesis import given, settings

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.one_f_one_b import build_1f1b, build_forward_only
from lightning_entrain.schedule.types import (
    Action,
    ActionKind,
    Placement,
    RowCounts,
    Schedule,
    row_counts,
)
from lightning_entrain.workload.sizes import SampleSize

from .helpers import cases, full_rows, lowered


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("3F2", Action(3, ActionKind.F, 2)),
        ("0I4", Action(0, ActionKind.I, 4)),
        ("1W4", Action(1, ActionKind.W, 4)),
        ("2B3>4", Action(2, ActionKind.B, 3, 4)),
        ("12SEND_F30>31", Action(12, ActionKind.SEND_F, 30, 31)),
        ("0RECV_B7", Action(0, ActionKind.RECV_B, 7)),
    ],
)
def test_action_text_parses_back(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F2", "3F", "3G2", "3F2>", "3F2>4x", "-1F2", "3f2"])
def test_bad_action_text_is_refused(text):
    with pytest.raises(ScheduleError, match="not an action"):
        Action.parse(text)


def test_actions_sort_with_and_without_target():
    actions = [
        Action(0, ActionKind.B, 1, 1),
        Action(0, ActionKind.B, 1),
        Action(0, ActionKind.F, 2),
    ]
    assert [str(a) for a in sorted(actions)] == ["0F2", "0B1", "0B1>1"]


@given(cases())
@settings(deadline=None)
def test_schedule_text_parses_back(case):
    placement, rows = case
    for built in (build_1f1b(placement, rows), build_forward_only(placement, rows)):
        for schedule in (built, lowered(built, rows).schedule):
            again = Schedule.from_text(schedule.to_text())
            assert again == schedule
            assert again.digest() == schedule.digest()


def test_digest_sees_one_swapped_action():
    schedule = build_1f1b(Placement.one_per_rank(1, 1), full_rows(3))
    first, second, *rest = schedule.ranks[0]
    other = Schedule(
        name=schedule.name,
        placement=schedule.placement,
        ranks=((second, first, *rest), *schedule.ranks[1:]),
    )
    assert other.digest() != schedule.digest()


@pytest.mark.parametrize(
    "text",
    ["", "schedule x\nrank 0: 0F0\n", "schedule x\nencoder_stages one\nllm_stages 1\n"],
)
def test_broken_schedule_text_is_refused(text):
    with pytest.raises(ScheduleError):
        Schedule.from_text(text)


def test_placements():
    assert Placement.one_per_rank(2, 1).stage_to_rank == (0, 1, 2)
    assert Placement.colocated(2, 2, 2).stage_to_rank == (0, 1, 0, 1)
    assert Placement.colocated(1, 1, 1).stage_to_rank == (0, 0)
    assert Placement.colocated(1, 2, 2).stage_to_rank == (0, 0, 1)
    assert Placement.contiguous(2, 4, 3).stage_to_rank == (0, 0, 1, 1, 2, 2)
    assert Placement.shared_boundary(2, 3).stage_to_rank == (0, 1, 1, 2, 3)
    vee = Placement.v_shaped(2, 4)
    assert vee.stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert (vee.num_stages, vee.num_ranks, vee.stages_of(1)) == (6, 3, (1, 4))


@pytest.mark.parametrize(
    ("encoder", "llm", "ranks"),
    [(0, 1, (0,)), (1, 1, (0,)), (1, 1, (0, 2)), (1, 2, (1, 2, 1))],
)
def test_bad_placement_is_refused(encoder, llm, ranks):
    with pytest.raises(ScheduleError):
        Placement(num_encoder_stages=encoder, num_llm_stages=llm, stage_to_rank=ranks)


def test_more_ranks_than_stages_is_refused():
    with pytest.raises(ScheduleError, match="every rank holds a stage"):
        Placement.contiguous(1, 1, 3)


def test_odd_v_is_refused():
    with pytest.raises(ScheduleError, match="even"):
        Placement.v_shaped(1, 2)


def test_row_counts_of_an_assignment():
    image = SampleSize(grids=((1, 4, 6),), num_text_tokens=5, num_label_tokens=2)
    pair = SampleSize(grids=((1, 2, 2), (1, 4, 4)), num_text_tokens=1, num_label_tokens=1)
    text = SampleSize(grids=(), num_text_tokens=9, num_label_tokens=3)
    replica = ReplicaAssignment(encoder=((0, 2), (), ()), llm=((0,), (2, 1), ()))
    rows = row_counts(replica, [image, text, pair])
    assert rows.encoder == (24 + 20, 0, 0)
    assert dict(rows.segments) == {(0, 0): 6, (0, 1): 5}
    assert dict(rows.segment_patches) == {(0, 0): 24, (0, 1): 20}
    assert rows.llm == (11, 6 + 9, 0)
    assert rows.max_lag == 1
    assert rows.patches_of((0, 1)) == 20


@pytest.mark.parametrize(
    "broken",
    [
        {"encoder": (4,), "segments": {(0, 0): 1}, "llm": (3, 3)},
        {"encoder": (4, 0), "segments": {(1, 0): 1}, "llm": (3, 3)},
        {"encoder": (4, 0), "segments": {(0, 2): 1}, "llm": (3, 3)},
        {"encoder": (4, 0), "segments": {(0, 1): 1}, "llm": (3, 0)},
        {"encoder": (0, 0), "segments": {(0, 1): 1}, "llm": (3, 3)},
        {"encoder": (4, 0), "segments": {}, "llm": (3, 3)},
    ],
)
def test_inconsistent_rows_are_refused(broken):
    with pytest.raises(ScheduleError):
        RowCounts(**broken)


def test_unknown_patches_of_one_of_several_segments():
    rows = RowCounts(encoder=(8, 0), segments={(0, 0): 1, (0, 1): 1}, llm=(3, 3))
    with pytest.raises(ScheduleError, match="segment_patches"):
        rows.patches_of((0, 0))
