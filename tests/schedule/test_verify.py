"""Valid programs pass; every corruption of one is caught."""

import dataclasses
import random

import pytest

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.lower import Program, lower
from lightning_entrain.schedule.one_f_one_b import build_1f1b, build_forward_only
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts, Schedule
from lightning_entrain.schedule.verify import verify

from .helpers import full_rows, lowered, random_placement, random_rows

B, F = ActionKind.B, ActionKind.F
NUM_SEEDS = 60


def with_lists(program, lists):
    schedule = dataclasses.replace(program.schedule, ranks=tuple(map(tuple, lists)))
    return dataclasses.replace(program, schedule=schedule)


def with_messages(program, **changes):
    """Replace messages by action."""
    return dataclasses.replace(program, messages={**program.messages, **changes["messages"]})


def random_program(rng):
    """A valid program with at least four transfers between ranks."""
    while True:
        placement = random_placement(rng)
        rows = random_rows(rng, rng.randint(2, 6), rng.randint(0, 1))
        build = rng.choice([build_1f1b, build_1f1b, build_forward_only])
        options = {"split_backward": rng.random() < 0.5} if build is build_1f1b else {}
        program = lowered(build(placement, rows, **options), rows)
        if len(program.messages) >= 8:
            return program, rows


def pick(rng, program, wanted=lambda action: True):
    """(rank, position) of a random action."""
    places = [
        (rank, position)
        for rank, own in enumerate(program.schedule.ranks)
        for position, action in enumerate(own)
        if wanted(action)
    ]
    return rng.choice(places)


def is_transfer(action):
    return not action.kind.is_compute


def drop(rng, program, rows):
    rank, position = pick(rng, program)
    lists = [list(own) for own in program.schedule.ranks]
    del lists[rank][position]
    return with_lists(program, lists)


def duplicate(rng, program, rows):
    rank, position = pick(rng, program)
    lists = [list(own) for own in program.schedule.ranks]
    lists[rank].insert(rng.randint(0, len(lists[rank])), lists[rank][position])
    return with_lists(program, lists)


def dependent_pairs(program, rows):
    """(rank, earlier, later): positions of actions of which the later needs the earlier."""
    graph = StepGraph(program.schedule.placement, rows)
    for rank, own in enumerate(program.schedule.ranks):
        makers = {}
        for position, action in enumerate(own):
            needs = [e.receive for e in graph.inputs(action)]
            if action.kind is B:
                needs.append(Action(action.stage, F, action.microbatch))
            if action.kind.is_send:
                needs.append(action)
            for need in needs:
                if need in makers:
                    yield rank, makers[need], position
            makers[action] = position
            for edge in graph.outputs(action):
                makers[edge.receive if graph.is_local(edge) else edge.send] = position


def swap(rng, program, rows):
    """Exchange an action with one that needs it."""
    rank, earlier, later = rng.choice(list(dependent_pairs(program, rows)))
    lists = [list(own) for own in program.schedule.ranks]
    own = lists[rank]
    own[earlier], own[later] = own[later], own[earlier]
    return with_lists(program, lists)


def delay(rng, program, rows):
    """Move an action behind one that needs it (a receive behind its use, for instance)."""
    rank, earlier, later = rng.choice(list(dependent_pairs(program, rows)))
    lists = [list(own) for own in program.schedule.ranks]
    lists[rank].insert(later, lists[rank].pop(earlier))
    return with_lists(program, lists)


def change_one_side(rng, program, rows):
    """One partner expects another shape, dtype, tag or peer."""
    rank, position = pick(rng, program, is_transfer)
    action = program.schedule.ranks[rank][position]
    message = program.messages[action]
    field, value = rng.choice(
        [
            ("rows", message.rows + rng.choice([-1, 1, 7])),
            ("columns", message.columns * 2),
            ("dtype", "bfloat16"),
            ("tag", message.tag + rng.choice([1, 1000])),
            ("source_rank", message.source_rank + 1),
            ("target_rank", message.target_rank + 1),
            ("microbatch", message.microbatch + 1),
            ("source_stage", message.source_stage + 1),
        ]
    )
    return with_messages(program, messages={action: dataclasses.replace(message, **{field: value})})


def change_both_sides(rng, program, rows):
    """Partners agree, but not with what the stages compute."""
    rank, position = pick(rng, program, is_transfer)
    message = program.messages[program.schedule.ranks[rank][position]]
    field, value = rng.choice(
        [
            ("rows", message.rows + 1),
            ("columns", message.columns + 1),
            ("dtype", "float64"),
            ("target_rank", message.source_rank),
            ("source_stage", message.target_stage),
            ("microbatch", message.microbatch + 1),
        ]
    )
    other = dataclasses.replace(message, **{field: value})
    return with_messages(
        program, messages={a: other for a, m in program.messages.items() if m == message}
    )


def reuse_tag(rng, program, rows):
    """Two messages between the same ranks with one tag."""
    pairs = [
        (a, b)
        for a in set(program.messages.values())
        for b in set(program.messages.values())
        if {a.source_rank, a.target_rank} == {b.source_rank, b.target_rank} and a.tag < b.tag
    ]
    first, second = rng.choice(sorted(pairs, key=str))
    other = dataclasses.replace(second, tag=first.tag)
    return with_messages(
        program, messages={a: other for a, m in program.messages.items() if m == second}
    )


def reorder_channel(rng, program, rows):
    """Exchange two receives of a channel on one side only."""
    pairs = []
    for rank, own in enumerate(program.schedule.ranks):
        received = [
            (p, program.messages[a].source_rank)
            for p, a in enumerate(own)
            if is_transfer(a) and not a.kind.is_send
        ]
        pairs += [(rank, p, q) for p, a in received for q, b in received if p < q and a == b]
    rank, p, q = rng.choice(pairs)
    lists = [list(own) for own in program.schedule.ranks]
    lists[rank][p], lists[rank][q] = lists[rank][q], lists[rank][p]
    return with_lists(program, lists)


def wrong_rank(rng, program, rows):
    """An action in the list of a rank that does not hold its stage."""
    rank, position = pick(rng, program)
    other = rng.choice([r for r in range(len(program.schedule.ranks)) if r != rank])
    lists = [list(own) for own in program.schedule.ranks]
    action = lists[rank].pop(position)
    lists[other].insert(rng.randint(0, len(lists[other])), action)
    return with_lists(program, lists)


def wrong_microbatch(rng, program, rows):
    """A compute action of another microbatch: one is now missing, one too many."""
    rank, position = pick(rng, program, lambda a: a.kind.is_compute)
    lists = [list(own) for own in program.schedule.ranks]
    action = lists[rank][position]
    others = [m for m in range(rows.num_microbatches + 2) if m != action.microbatch]
    lists[rank][position] = dataclasses.replace(action, microbatch=rng.choice(others))
    return with_lists(program, lists)


def wrong_segment(rng, program, rows):
    """A transfer or gradient of another segment."""
    rank, position = pick(rng, program, lambda a: a.target is not None)
    lists = [list(own) for own in program.schedule.ranks]
    action = lists[rank][position]
    lists[rank][position] = dataclasses.replace(
        action, target=rng.choice([None, action.target + 1, action.target - 1])
    )
    return with_lists(program, lists)


def other_rows(rng, program, rows):
    """A program lowered for other sizes than those of the step."""
    message = program.messages[rng.choice(sorted(program.messages))]
    factor = rng.choice([2, 3])
    scaled = {key: n * factor for key, n in rows.segments.items()}
    grown = dataclasses.replace(
        rows,
        encoder=tuple(n * factor for n in rows.encoder),
        segments=scaled,
        llm=tuple(n * factor for n in rows.llm),
        segment_patches={key: n * factor for key, n in rows.segment_patches.items()},
    )
    assert message.rows
    schedule = dataclasses.replace(
        program.schedule,
        ranks=tuple(tuple(a for a in own if a.kind.is_compute) for own in program.schedule.ranks),
    )
    return lower(schedule, grown, boundary_columns=program.boundary_columns, dtype="float32")


CORRUPTIONS = [
    drop,
    duplicate,
    swap,
    delay,
    change_one_side,
    change_both_sides,
    reuse_tag,
    reorder_channel,
    wrong_rank,
    wrong_microbatch,
    wrong_segment,
    other_rows,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_random_corruptions_are_caught(corrupt):
    """12 kinds x 60 programs = 720 corruptions."""
    num_caught = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(f"{corrupt.__name__} {seed}")
        while True:
            program, rows = random_program(rng)
            try:
                broken = corrupt(rng, program, rows)
                break
            except IndexError:  # this program offers no such place
                continue
        verify(program, rows)
        with pytest.raises(ScheduleError) as caught:
            verify(broken, rows)
        assert "rank" in str(caught.value)
        assert "position" in str(caught.value)
        num_caught += 1
    assert num_caught == NUM_SEEDS


def lazy(program, rows):
    """The same program with each receive posted only where its tensor is needed."""
    graph = StepGraph(program.schedule.placement, rows)
    lists = []
    for own in program.schedule.ranks:
        moved = []
        for action in own:
            if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                continue
            moved += [e.receive for e in graph.inputs(action) if e.receive in program.messages]
            moved.append(action)
        lists.append(moved)
    return with_lists(program, lists)


@pytest.mark.parametrize("seed", range(40))
def test_lazy_receives_dead_lock_with_one_stream(seed):
    # Stage S-2 sends F1 before it asks for the gradient of 0; stage S-1 sends that gradient
    # before it asks for F1. With one stream per rank each waits for the other.
    rng = random.Random(seed)
    rows = full_rows(rng.randint(2, 9))
    program = lowered(
        build_1f1b(Placement.one_per_rank(rng.randint(1, 4), rng.randint(1, 4)), rows), rows
    )
    verify(program, rows)
    with pytest.raises(ScheduleError, match="dead-lock with one stream per rank"):
        verify(lazy(program, rows), rows)


def test_lazy_receives_of_tag_matched_transfers_would_progress():
    rows = full_rows(4)
    program = lowered(build_1f1b(Placement.one_per_rank(2, 2), rows), rows)
    with pytest.raises(ScheduleError) as caught:
        verify(lazy(program, rows), rows)
    assert "one stream per pair" in str(caught.value)
    assert "tag-matched" not in str(caught.value)
    assert "per direction" not in str(caught.value)


def program_of(lists, rows, placement=None):
    """A program with hand-written compute order and the transfers right beside their actions."""
    placement = placement or Placement.one_per_rank(1, 1)
    good = lowered(build_1f1b(placement, rows), rows)
    graph = StepGraph(placement, rows)
    full = []
    for line in lists:
        own = []
        for action in map(Action.parse, line.split()):
            own += [e.receive for e in graph.inputs(action)]
            own.append(action)
            own += [e.send for e in graph.outputs(action)]
        full.append(list(dict.fromkeys(own)))
    return with_lists(good, full)


def test_ranks_that_wait_for_each_other_are_caught():
    rows = full_rows(2)
    broken = program_of(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], rows)
    with pytest.raises(ScheduleError) as caught:
        verify(broken, rows)
    assert "dead-lock" in str(caught.value) or "equal order" in str(caught.value)
    crossed = program_of(["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"], rows)
    with pytest.raises(ScheduleError, match=r"equal order|dead-lock"):
        verify(crossed, rows)


def test_split_gradients():
    rows = full_rows(2)
    good = program_of(["0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0"], rows)
    with pytest.raises(ScheduleError, match="dead-lock"):
        verify(good, rows)  # its receives are lazy
    schedule = Schedule(
        name="by_hand",
        placement=Placement.one_per_rank(1, 1),
        ranks=tuple(tuple(a for a in own if a.kind.is_compute) for own in good.schedule.ranks),
    )
    verify(lowered(schedule, rows), rows)


@pytest.mark.parametrize(
    ("encoder", "llm", "problem"),
    [
        ("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1", "its I comes later"),
        ("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1", "B or W of microbatch 0 on stage 0 is missing"),
        ("0F0 0F1 0I0 0W0 0B0 0B1", "1F0 1B0 1F1 1B1", "its work is done twice"),
        ("0F0 0F1 0I0 0B0 0B1", "1F0 1B0 1F1 1B1", "its work is done twice"),
        ("0F0 0F1 0W0 0B1", "1F0 1B0 1F1 1B1", "its I comes later"),
    ],
)
def test_wrong_split_gradients_are_caught(encoder, llm, problem):
    rows = full_rows(2)
    with pytest.raises(ScheduleError, match=problem):
        verify(program_of([encoder, llm], rows), rows)


def test_peak_live():
    rows = full_rows(6)
    program = lowered(build_1f1b(Placement.one_per_rank(2, 1), rows), rows)
    verify(program, rows, max_live=3)
    with pytest.raises(ScheduleError, match=r"rank 0, position \d+, 0F2: 3 microbatches are live"):
        verify(program, rows, max_live=2)


def test_missing_backward_is_not_taken_for_forward_only():
    rows = full_rows(2)
    forward = lowered(build_forward_only(Placement.one_per_rank(1, 1), rows), rows)
    schedule = dataclasses.replace(forward.schedule, forward_only=False)
    with pytest.raises(ScheduleError, match="missing"):
        verify(dataclasses.replace(forward, schedule=schedule), rows)
    trained = lowered(build_1f1b(Placement.one_per_rank(1, 1), rows), rows)
    schedule = dataclasses.replace(trained.schedule, forward_only=True)
    with pytest.raises(ScheduleError, match="forward"):
        verify(dataclasses.replace(trained, schedule=schedule), rows)


def test_number_of_lists():
    rows = full_rows(2)
    program = lowered(build_1f1b(Placement.one_per_rank(1, 1), rows), rows)
    with pytest.raises(ScheduleError, match="one per rank"):
        verify(with_lists(program, program.schedule.ranks[:1]), rows)


def test_program_record():
    rows = RowCounts(encoder=(8,), segments={(0, 0): 2}, llm=(5,))
    program = lowered(build_1f1b(Placement.one_per_rank(2, 2), rows), rows)
    assert isinstance(program, Program)
    shapes = {
        str(a): (m.rows, m.columns, m.source_rank, m.target_rank)
        for a, m in program.messages.items()
        if a.kind.is_send
    }
    assert shapes == {
        "0SEND_F0": (8, 5, 0, 1),
        "1SEND_F0>0": (2, 6, 1, 2),
        "2SEND_F0": (5, 7, 2, 3),
        "3SEND_B0": (5, 7, 3, 2),
        "2SEND_B0>0": (2, 6, 2, 1),
        "1SEND_B0": (8, 5, 1, 0),
    }
    with pytest.raises(ScheduleError, match="lower it once"):
        lowered(program.schedule, rows)
    with pytest.raises(ScheduleError, match="boundary"):
        lower(build_1f1b(Placement.one_per_rank(2, 2), rows), rows, boundary_columns=[3], dtype="x")


def test_messages_that_partners_disagree_on():
    rows = full_rows(3)
    program = lowered(build_1f1b(Placement.one_per_rank(1, 1), rows), rows)
    receive = Action.parse("1RECV_F1>1")
    other = dataclasses.replace(program.messages[receive], tag=99)
    with pytest.raises(ScheduleError, match="its partner 1RECV_F1>1 has another message"):
        verify(with_messages(program, messages={receive: other}), rows)
    fewer = {a: m for a, m in program.messages.items() if a != receive}
    with pytest.raises(ScheduleError, match=r"its partner|has no message"):
        verify(dataclasses.replace(program, messages=fewer), rows)
    send = Action.parse("0SEND_F1>1")
    none = {a: m for a, m in fewer.items() if a != send}
    with pytest.raises(ScheduleError, match="it has no message"):
        verify(dataclasses.replace(program, messages=none), rows)


def test_order_of_a_channel_is_named():
    rows = full_rows(4)
    program = lowered(build_1f1b(Placement.one_per_rank(1, 1), rows), rows)
    lists = [list(own) for own in program.schedule.ranks]
    first, second = (lists[1].index(Action.parse(t)) for t in ("1RECV_F0>0", "1RECV_F1>1"))
    assert first + 1 == second  # both are posted before anything runs
    lists[1][first], lists[1][second] = lists[1][second], lists[1][first]
    with pytest.raises(ScheduleError, match=r"rank 1, position 0, 1RECV_F1>1: rank 0 sends"):
        verify(with_lists(program, lists), rows)


def test_segments_on_one_stage_and_whole_microbatches_on_the_next():
    rows = RowCounts(
        encoder=(8, 0),
        segments={(0, 0): 1, (0, 1): 1},
        llm=(3, 3),
        segment_patches={(0, 0): 4, (0, 1): 4},
    )
    placement = Placement.colocated(2, 1, 1)
    good = build_1f1b(placement, rows, split_backward=True)
    verify(lowered(good, rows), rows)
    own = [a for a in good.ranks[0] if not (a.stage == 0 and a.kind is B)]
    mixed = dataclasses.replace(good, ranks=((*own, Action.parse("0B0")),))
    with pytest.raises(ScheduleError, match="stage 1 never makes its input"):
        verify(Program(schedule=mixed, messages={}, boundary_columns=(1, 1), dtype="x"), rows)
