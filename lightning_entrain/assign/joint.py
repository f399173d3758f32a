"""Policy ``joint``: both modules balanced at once, by local search over places and lags.

Per replica it minimises the sum over both modules and all microbatches of the squared deviation of
the load from its target, relative to the mean. The paper's assignment is one of its starting points
and what it is held against: the result is never worse than it on that sum nor on the largest
combined load (see :func:`measures.peak`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_entrain.assign.anneal import Job, Start, run_anneal
from lightning_entrain.assign.entrain import assign_entrain, entrain_replica
from lightning_entrain.assign.measures import peak, squared_deviations
from lightning_entrain.assign.numbers import loads_of, mix
from lightning_entrain.assign.problem import Problem, place
from lightning_entrain.assign.replicas import split_greedy
from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import AssignmentError, ConfigError

_STEPS_PER_SAMPLE = 1500
_LEAST_STEPS = 20_000
_SPLIT_STEPS_PER_SAMPLE = 50

_EVEN_START = (200, 3)
_LAG_START = (60, 3)
_PAPER_START = (600, 5)
_HOTTER_STARTS = ((1000, 3), (3000, 3), (10_000, 3)) * 4
_SPLIT = (30, 0)
"""Start and end temperature, as deviations from the target in units of 10^-4 of the mean load.

Two runs, because which is better depends on the data. One keeps the even numbers of samples it
starts with and finds places without lag first: a lag through all microbatches in a row, once there,
takes many steps to undo. The other starts from the paper's places, hotter, and finds uneven
numbers. The hotter starts serve few samples, each of which weighs much.
"""
_FEW_SAMPLES = 32


def assign_joint(problem: Problem) -> tuple[ReplicaAssignment, ...]:
    """Search the split into replicas, then each replica's microbatches.

    Raises:
        AssignmentError: If the token cap leaves no room.
        ConfigError: If the ramp has more or fewer entries than there are microbatches.
    """
    if problem.ramp is not None and len(problem.ramp) != problem.num_microbatches:
        raise ConfigError(
            f"ramp has {len(problem.ramp)} entries for {problem.num_microbatches} microbatches",
            limit="one load target per microbatch",
        )
    greedy = split_greedy(problem)
    improved = improve_split(problem, greedy)
    found = _search_all(problem, improved)
    if problem.ramp is not None:
        return found
    try:
        paper = assign_entrain(problem)
    except AssignmentError:
        return found  # The greedy algorithm did not find room under the cap: nothing to compare.
    if _never_worse(problem, found, paper):
        return found
    if improved != greedy:
        found = _search_all(problem, greedy)
    return found if _never_worse(problem, found, paper) else paper


def improve_split(problem: Problem, replicas: list[list[int]]) -> list[list[int]]:
    """Exchange samples between replicas, so that their totals in both modules become even.

    The slowest replica sets the step. Numbers of samples stay as they are where
    ``problem.equal_counts``.

    Returns:
        Per replica its samples, in ``problem.order``.
    """
    if len(replicas) == 1 or problem.num_samples == 0:
        return replicas
    home = {i: r for r, samples in enumerate(replicas) for i in samples}
    cap = None if problem.max_tokens is None else problem.max_tokens * problem.num_microbatches
    places = [home[i] for i in problem.order]
    start = Start(places, places)
    job = Job(
        problem=replace(problem, max_tokens=cap, max_lag=0, ramp=None),
        samples=problem.order,
        num_images=problem.num_samples,
        num_bins=len(replicas),
        exchanges_only=problem.equal_counts,
    )
    seed = mix(problem.seed, problem.num_replicas)
    steps = int(_SPLIT_STEPS_PER_SAMPLE * problem.num_samples * problem.effort)
    end = run_anneal(job, start, _SPLIT, steps, seed)
    if end.score >= job.score(start) or job.heaviest(end) > job.heaviest(start):
        return replicas
    result: list[list[int]] = [[] for _ in replicas]
    for i, r in zip(problem.order, end.llm, strict=True):
        result[r].append(i)
    return result


def _search_all(problem: Problem, split: list[list[int]]) -> tuple[ReplicaAssignment, ...]:
    return tuple(search_replica(problem, samples, r) for r, samples in enumerate(split))


def search_replica(
    problem: Problem, samples: Sequence[int], replica_index: int
) -> ReplicaAssignment:
    """Assign one replica's samples to microbatches.

    Args:
        problem: The global batch.
        samples: The replica's, in ``problem.order``.
        replica_index: Of the replica; replicas search with different random numbers.

    Raises:
        AssignmentError: If the token cap leaves no room.
    """
    paper, is_paper = _paper_start(problem, samples)
    if not any(problem.encoder_units[i] or problem.llm_units[i] for i in samples):
        return paper  # Nothing to balance.
    images, texts = problem.split_images(samples)
    ids = images + texts
    job = Job(problem=problem, samples=ids, num_images=len(images), num_bins=paper.num_microbatches)
    steps = max(_LEAST_STEPS, int(_STEPS_PER_SAMPLE * len(ids) * problem.effort))
    seed = mix(problem.seed, replica_index, paper.num_microbatches)
    paper_start = _slots(paper, ids)
    even = _even_start(job)
    first = even if job.fits(even) else paper_start
    ends = [
        _even_run(job, first, steps, seed),
        run_anneal(job, paper_start, _PAPER_START, steps, mix(seed, 1)),
    ]
    if len(ids) <= _FEW_SAMPLES:
        ends += [
            run_anneal(job, first, temperatures, steps // 4, mix(seed, number))
            for number, temperatures in enumerate(_HOTTER_STARTS, start=2)
        ]
    found = [_record(job, end) for end in sorted(ends, key=lambda end: end.score)]
    if problem.ramp is not None or not is_paper:
        return found[0]
    for candidate in itertools.chain(found, _held_runs(job, paper, steps, seed)):
        if _never_worse(problem, (candidate,), (paper,)):
            return candidate
    return paper


def _even_run(job: Job, start: Start, num_steps: int, seed: int) -> Start:
    if job.problem.max_lag == 0:
        return run_anneal(job, start, _EVEN_START, num_steps, mix(seed, 0))
    together = replace(job, problem=replace(job.problem, max_lag=0))
    half = run_anneal(together, start, _EVEN_START, num_steps // 2, mix(seed, 0))
    return run_anneal(job, half, _LAG_START, num_steps // 2, mix(seed, 0, 0))


def _held_runs(
    job: Job, paper: ReplicaAssignment, num_steps: int, seed: int
) -> Iterator[ReplicaAssignment]:
    """Runs that never exceed the largest combined load of the paper's; best first."""
    start = _slots(paper, job.samples)
    ceiling = max(1, job.ceiling(start))
    ends = [
        run_anneal(job, start, temperatures, num_steps, mix(seed, -number), ceiling=ceiling)
        for number, temperatures in enumerate((_EVEN_START, *_HOTTER_STARTS), start=1)
    ]
    for end in sorted(ends, key=lambda end: end.score):
        yield _record(job, end)


def _paper_start(problem: Problem, samples: Sequence[int]) -> tuple[ReplicaAssignment, bool]:
    """The paper's assignment, or any that fits where it finds no room under the token cap."""
    plain = replace(problem, ramp=None, limit_by_heaviest=_limited(problem))
    try:
        return entrain_replica(plain, samples), True
    except AssignmentError:
        bins: list[list[int]] = [[] for _ in range(problem.num_microbatches)]
        zeros = [0] * len(bins)
        largest_first = sorted(samples, key=lambda i: -problem.tokens[i])
        place(problem, largest_first, problem.tokens, bins, zeros, list(zeros))
        llm = tuple(tuple(sorted(entry)) for entry in bins)
        encoder = tuple(tuple(i for i in entry if problem.has_image(i)) for entry in llm)
        return ReplicaAssignment(encoder=encoder, llm=llm), False


def _limited(problem: Problem) -> bool:
    # A ramp names a target for every microbatch, so all of them are used.
    return problem.limit_by_heaviest and problem.ramp is None


def _slots(replica: ReplicaAssignment, ids: Sequence[int]) -> Start:
    encoder = {i: k for k, entry in enumerate(replica.encoder) for i in entry}
    llm = {i: k for k, entry in enumerate(replica.llm) for i in entry}
    return Start([encoder.get(i, -1) for i in ids], [llm[i] for i in ids])


def _even_start(job: Job) -> Start:
    """Samples dealt back and forth by size: numbers per microbatch differ by at most one."""
    period = 2 * job.num_bins
    turns = [n % period for n in range(len(job.samples))]
    llm = [turn if turn < job.num_bins else period - 1 - turn for turn in turns]
    return Start([k if n < job.num_images else -1 for n, k in enumerate(llm)], llm)


def _record(job: Job, slots: Start) -> ReplicaAssignment:
    encoder: list[list[int]] = [[] for _ in range(job.num_bins)]
    llm: list[list[int]] = [[] for _ in range(job.num_bins)]
    for i, k, j in zip(job.samples, slots.encoder, slots.llm, strict=True):
        if k >= 0:
            encoder[k].append(i)
        llm[j].append(i)
    return ReplicaAssignment(
        encoder=tuple(tuple(sorted(entry)) for entry in encoder),
        llm=tuple(tuple(sorted(entry)) for entry in llm),
    )


def _never_worse(
    problem: Problem,
    found: tuple[ReplicaAssignment, ...],
    paper: tuple[ReplicaAssignment, ...],
) -> bool:
    """Whether ``found`` is at most ``paper`` on squared deviations and the largest combined load.

    Both are taken per replica against its own mean, and over all replicas against the common mean.
    Only equal numbers of microbatches can be compared; others pass.
    """
    counts = [sorted(r.num_microbatches for r in replicas) for replicas in (found, paper)]
    if counts[0] != counts[1]:
        return True
    return all(
        mine <= theirs
        for mine, theirs in zip(_figures(problem, found), _figures(problem, paper), strict=True)
    )


def _figures(problem: Problem, replicas: tuple[ReplicaAssignment, ...]) -> tuple[float, ...]:
    pairs = [
        (loads_of(problem.encoder_cost, r.encoder), loads_of(problem.llm_cost, r.llm))
        for r in replicas
    ]
    pooled = ([x for e, _ in pairs for x in e], [x for _, m in pairs for x in m])
    return (
        sum(squared_deviations(e, m) for e, m in pairs),
        max(peak(e, m) for e, m in pairs),
        squared_deviations(*pooled),
        peak(*pooled),
    )
