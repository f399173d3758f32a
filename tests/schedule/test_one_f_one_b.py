import subprocess
import sys

import pytest
from hypothesis import given, settings

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.one_f_one_b import build_1f1b, build_forward_only
from lightning_entrain.schedule.types import ActionKind, Placement, RowCounts
from lightning_entrain.schedule.verify import peak_live, verify

from .helpers import cases, full_rows, lowered, runs_blocking


def texts(schedule):
    return [" ".join(map(str, own)) for own in schedule.ranks]


def test_golden_order_of_two_stages():
    schedule = build_1f1b(Placement.one_per_rank(1, 1), full_rows(4))
    assert texts(schedule) == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


def textbook(stage, num_stages, num_microbatches):
    """Warm-up of S-s-1 forwards, then forward and backward in turn, then the rest backward."""
    warmup = min(num_stages - stage - 1, num_microbatches)
    order = [f"{stage}F{m}" for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        order += [f"{stage}F{warmup + m}", f"{stage}B{m}"]
    order += [f"{stage}B{m}" for m in range(num_microbatches - warmup, num_microbatches)]
    return " ".join(order)


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 3), (3, 3), (5, 3), (8, 8)])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 17, 64])
def test_one_stage_per_rank_is_the_textbook_order(stages, num_microbatches):
    schedule = build_1f1b(Placement.one_per_rank(*stages), full_rows(num_microbatches))
    expected = [textbook(s, sum(stages), num_microbatches) for s in range(sum(stages))]
    assert texts(schedule) == expected


def test_all_stages_on_one_rank_finish_each_microbatch_first():
    schedule = build_1f1b(Placement.colocated(1, 1, 1), full_rows(2))
    assert texts(schedule) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


def test_text_only_microbatch_has_no_encoder_action():
    rows = RowCounts(encoder=(8, 0, 4), segments={(0, 0): 2, (2, 2): 1}, llm=(5, 6, 7))
    schedule = build_1f1b(Placement.one_per_rank(1, 1), rows)
    assert texts(schedule)[0] == "0F0 0F2 0B0 0B2"
    assert [a.microbatch for a in schedule.ranks[1] if a.kind is ActionKind.F] == [0, 1, 2]
    program = lowered(schedule, rows)
    verify(program, rows)
    assert {m.microbatch for m in program.messages.values()} == {0, 2}


def test_empty_step():
    rows = RowCounts(encoder=(0, 0), segments={}, llm=(0, 0))
    for placement in (Placement.one_per_rank(2, 2), Placement.colocated(1, 1, 1)):
        for build in (build_1f1b, build_forward_only):
            schedule = build(placement, rows)
            assert not any(schedule.ranks)
            verify(lowered(schedule, rows), rows)


def test_no_microbatch_at_all():
    rows = RowCounts(encoder=(), segments={}, llm=())
    verify(lowered(build_1f1b(Placement.one_per_rank(1, 1), rows), rows), rows)


@given(cases())
@settings(deadline=None)
def test_every_1f1b_verifies_and_runs_with_blocking_transfers(case):
    placement, rows = case
    for split in (False, True):
        schedule = build_1f1b(placement, rows, split_backward=split)
        assert schedule == build_1f1b(placement, rows, split_backward=split)
        program = lowered(schedule, rows)
        verify(program, rows)
        assert runs_blocking(program, rows)
        num_stages = placement.num_stages
        for rank, peak in enumerate(peak_live(schedule, rows)):
            assert peak <= sum(num_stages - s for s in placement.stages_of(rank))


@given(cases())
@settings(deadline=None)
def test_every_forward_only_verifies(case):
    placement, rows = case
    schedule = build_forward_only(placement, rows)
    program = lowered(schedule, rows)
    verify(program, rows, max_live=1)
    assert runs_blocking(program, rows)
    assert {a.kind for own in schedule.ranks for a in own} <= {ActionKind.F}


def deferred_rows(num_microbatches):
    """Each encoder microbatch gives half its rows to the next LLM microbatch."""
    last = num_microbatches - 1
    segments = {(k, j): 1 for k in range(last) for j in (k, k + 1)} | {(last, last): 2}
    return RowCounts(
        encoder=(8,) * num_microbatches,
        segments=segments,
        llm=(5,) * num_microbatches,
        segment_patches={key: 4 * n for key, n in segments.items()},
    )


def test_deferral_delays_the_encoder_backward_by_one():
    rows = deferred_rows(4)
    plain = build_1f1b(Placement.one_per_rank(1, 1), rows)
    assert texts(plain)[0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    split = build_1f1b(Placement.one_per_rank(1, 1), rows, split_backward=True)
    assert texts(split)[0] == "0F0 0F1 0B0>0 0B0>1 0B1>1 0F2 0B1>2 0B2>2 0F3 0B2>3 0B3"


def test_eager_forward_adds_warm_up_on_the_encoder():
    rows = full_rows(12)
    eager = build_1f1b(Placement.one_per_rank(2, 2), rows, caps=[6, 5, 2, 1])
    assert texts(eager)[0].startswith("0F0 0F1 0F2 0F3 0F4 ")
    # An eager stage may hold more, never more than its cap.
    assert peak_live(eager, rows) <= (6, 5, 2, 1)
    assert peak_live(eager, rows)[0] > 4
    verify(lowered(eager, rows), rows)


def test_cap_too_small_for_deferral_is_refused():
    with pytest.raises(ScheduleError, match="more microbatches in flight"):
        build_1f1b(Placement.one_per_rank(1, 1), deferred_rows(4), caps=[1, 1])


@pytest.mark.parametrize("caps", [[1], [0, 1], [1, 1, 1]])
def test_bad_caps_are_refused(caps):
    with pytest.raises(ScheduleError, match="caps"):
        build_1f1b(Placement.one_per_rank(1, 1), full_rows(2), caps=caps)


def test_schedule_imports_fast_and_without_torch_or_numba():
    code = (
        "import sys, time; start = time.perf_counter();"
        "import lightning_entrain.schedule.verify, lightning_entrain.schedule.predict;"
        "import lightning_entrain.schedule.ramp, lightning_entrain.schedule.limits;"
        "import lightning_entrain.schedule.dip, lightning_entrain.schedule.timeline;"
        "assert not {'torch', 'numba'} & set(sys.modules);"
        "assert time.perf_counter() - start < 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
