"""Random placements and rows, and a naive interpreter to hold the package against."""

import random

from hypothesis import strategies as st

from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.lower import lower
from lightning_entrain.schedule.types import Placement, RowCounts


def full_rows(num_microbatches):
    """Every microbatch with an image, no deferral."""
    every = range(num_microbatches)
    return RowCounts(
        encoder=tuple(4 * (k + 2) for k in every),
        segments={(k, k): k + 2 for k in every},
        llm=tuple(3 * k + 10 for k in every),
    )


def random_rows(rng, num_microbatches, max_lag):
    """Rows with empty and text-only microbatches, and deferral up to max_lag."""
    patches, text = {}, [rng.choice([0, 3, 8]) for _ in range(num_microbatches)]
    for k in range(num_microbatches):
        for j in range(k, min(k + max_lag, num_microbatches - 1) + 1):
            if rng.random() < 0.6:
                patches[k, j] = 4 * rng.randint(1, 9)
    encoder = [sum(n for (k, _), n in patches.items() if k == m) for m in range(num_microbatches)]
    vision = [sum(n for (_, j), n in patches.items() if j == m) for m in range(num_microbatches)]
    return RowCounts(
        encoder=tuple(encoder),
        segments={key: n // 4 for key, n in patches.items()},
        llm=tuple(t + v // 4 for t, v in zip(text, vision, strict=True)),
        segment_patches=patches,
    )


def random_placement(rng):
    encoder, llm = rng.randint(1, 4), rng.randint(1, 4)
    total = encoder + llm
    choice = rng.randrange(5)
    if choice == 0:
        return Placement.one_per_rank(encoder, llm)
    if choice == 1:
        return Placement.contiguous(encoder, llm, rng.randint(1, total))
    if choice == 2:
        return Placement.colocated(encoder, llm, rng.randint(1, max(encoder, llm)))
    if choice == 3 and total % 2 == 0:
        return Placement.v_shaped(encoder, llm)
    # Any map of stages to ranks is legal.
    ranks = [rng.randrange(total) for _ in range(total)]
    names = {rank: index for index, rank in enumerate(dict.fromkeys(ranks))}
    return Placement(
        num_encoder_stages=encoder,
        num_llm_stages=llm,
        stage_to_rank=tuple(names[rank] for rank in ranks),
    )


@st.composite
def cases(draw, max_microbatches=7, max_lag=1):
    """(placement, rows)."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_microbatches = draw(st.integers(1, max_microbatches))
    lag = draw(st.integers(0, max_lag))
    return random_placement(rng), random_rows(rng, num_microbatches, lag)


def lowered(schedule, rows):
    columns = [5 + s for s in range(schedule.placement.num_stages - 1)]
    return lower(schedule, rows, boundary_columns=columns, dtype="float32")


def runs_blocking(program, rows):
    """Run the lists one action at a time, every transfer blocking both ranks until they meet."""
    graph = StepGraph(program.schedule.placement, rows)
    lists = [list(own) for own in program.schedule.ranks]
    have = set()
    moved = True
    while moved:
        moved = False
        for own in lists:
            if not own:
                continue
            action = own[0]
            if action.kind.is_compute:
                if not have.issuperset(graph.inputs(action)):
                    continue
                have.update(e for e in graph.outputs(action) if graph.is_local(e))
                own.pop(0)
                moved = True
                continue
            if not action.kind.is_send:
                continue
            message = program.messages[action]
            other = lists[message.target_rank]
            met = other and not other[0].kind.is_compute and not other[0].kind.is_send
            if met and program.messages[other[0]] == message:
                made = [e for e in _edges(graph) if e.send == action]
                have.update(made)
                own.pop(0)
                other.pop(0)
                moved = True
    return not any(lists)


def _edges(graph):
    from lightning_entrain.schedule.types import Action, ActionKind

    for stage in range(graph.placement.num_stages):
        for m in graph.microbatches(stage):
            yield from graph.outputs(Action(stage, ActionKind.F, m))
            for target in (None, *graph.targets(stage, m)):
                yield from graph.outputs(Action(stage, ActionKind.B, m, target))
