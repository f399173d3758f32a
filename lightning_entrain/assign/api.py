"""The one call that assigns the samples of a global batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike

from lightning_entrain.assign.problem import Problem, build_problem, is_whole
from lightning_entrain.assign.ramps import resample
from lightning_entrain.assign.registry import POLICIES, Policy
from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import AssignmentError, ConfigError

Objective = Callable[[Assignment], float]
"""Scores an assignment; lower is better."""

NumMicrobatches = int | tuple[int, int] | str

_SCREENING = 1 / 6
_REFINED = 2


def assign_samples(
    encoder_cost: ArrayLike,
    llm_cost: ArrayLike,
    *,
    num_replicas: int,
    num_microbatches: NumMicrobatches,
    policy: str = "joint",
    seed: int = 0,
    max_lag: int = 1,
    equal_counts: bool = True,
    limit_by_heaviest: bool = True,
    token_counts: ArrayLike | None = None,
    max_tokens: int | None = None,
    ramp: Sequence[float] | None = None,
    objective: Objective | None = None,
    effort: float = 1.0,
    **options: Any,
) -> Assignment:
    """Assign each sample of a global batch to a replica and its microbatches.

    Equal arguments give an equal :meth:`Assignment.digest` on every machine, with numba's compiled
    search or without.

    Args:
        encoder_cost: Predicted encoder forward time per sample, ``[num_samples]``, any fixed unit.
            0 means that the sample has no image.
        llm_cost: Likewise for the LLM.
        num_replicas: Data-parallel replicas.
        num_microbatches: Microbatches per replica (K): a number, or an inclusive range
            ``(low, high)`` to choose from, or ``"auto"`` for a quarter below to a quarter above
            four samples per microbatch. A replica may use fewer, see ``limit_by_heaviest``.
        policy: One of ``fixed``, ``disttrain``, ``dip``, ``entrain`` (the paper's) and ``joint``.
        seed: Of the search (``joint``).
        max_lag: 1 lets a sample's LLM work lag by one microbatch (deferral), 0 forbids it.
        equal_counts: Give every replica equally many samples (``disttrain``, ``entrain``,
            ``joint``; the others cut the batch into runs whose lengths differ by at most one).
        limit_by_heaviest: Use no more microbatches than total / heaviest encoder cost (paper,
            section 5.1; ``entrain`` and ``joint``). With an objective, ``joint`` tries both.
        token_counts: Tokens per sample, integers; needed with ``max_tokens``.
        max_tokens: Cap on the summed tokens of any encoder or LLM microbatch. ``entrain`` and
            ``joint`` keep to it, the other policies refuse what exceeds it.
        ramp: Relative load target per microbatch (``joint``), for example
            :func:`ramps.trapezoid`; stretched to the number of microbatches. None for equal loads.
        objective: Scores candidate assignments, lower is better, for example by simulation. The
            candidates are all numbers of microbatches asked for, and with ``joint`` also no
            deferral and no limit by the heaviest sample. Without it the least squared deviation
            per microbatch decides.
        effort: Factor on the number of search steps.
        options: The policy's own options: ``num_stages`` (``disttrain``), ``num_groups``
            (``dip``), ``threshold_quantile``, ``odd`` and ``max_sums`` (``entrain``).

    Raises:
        AssignmentError: If costs, counts or the token cap cannot be met.
        ConfigError: If an option cannot be used.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}", limit=f"one of {', '.join(POLICIES)}")
    function = POLICIES[policy]
    _check_options(policy, function, options)
    if ramp is not None and policy != "joint":
        raise ConfigError(
            f"ramp is set with policy {policy!r}",
            limit="only 'joint' can aim at unequal microbatches",
            remedy="use policy='joint' or ramp=None",
        )
    problem = build_problem(
        encoder_cost,
        llm_cost,
        num_replicas=num_replicas,
        num_microbatches=1,
        token_counts=token_counts,
        max_tokens=max_tokens,
        max_lag=max_lag,
        seed=seed,
        equal_counts=equal_counts and policy in ("disttrain", "entrain", "joint"),
        limit_by_heaviest=limit_by_heaviest,
        ramp=ramp,
        effort=effort,
    )
    counts = _counts(num_microbatches, problem)
    candidates = list(_candidates(problem, counts, policy, objective))
    if len(candidates) == 1 and objective is None:
        return _assign(candidates[0], policy, options)
    return _choose(candidates, policy, options, objective or _unevenness)


def _assign(problem: Problem, policy: str, options: dict[str, Any]) -> Assignment:
    assignment = Assignment(
        replicas=POLICIES[policy](problem, **options),
        policy=policy,
        encoder_cost=problem.encoder_cost,
        llm_cost=problem.llm_cost,
    )
    _check_cap(problem, assignment)
    return assignment


def _candidates(
    problem: Problem, counts: Sequence[int], policy: str, objective: Objective | None
) -> Iterator[Problem]:
    """What to choose from: the asked-for first, for it wins ties."""
    search = policy == "joint" and objective is not None
    for count in counts:
        ramp = None if problem.ramp is None else resample(problem.ramp, count)
        plain = replace(problem, num_microbatches=count, ramp=ramp)
        for lag in range(problem.max_lag, -1 if search else problem.max_lag - 1, -1):
            yield replace(plain, max_lag=lag)
            if search and problem.limit_by_heaviest and ramp is None:
                yield replace(plain, max_lag=lag, limit_by_heaviest=False)


def _choose(
    candidates: Sequence[Problem], policy: str, options: dict[str, Any], objective: Objective
) -> Assignment:
    """Assign all candidates with little effort, the best few with the full one."""
    screening = policy == "joint" and len(candidates) > _REFINED
    factor = _SCREENING if screening else 1.0
    scored: list[tuple[float, int, Assignment]] = []
    refused: AssignmentError | None = None
    seen: set[str] = set()
    for number, candidate in enumerate(candidates):
        quick = replace(candidate, effort=candidate.effort * factor)
        try:
            assignment = _assign(quick, policy, options)
        except AssignmentError as error:  # The cap may need more microbatches.
            refused = error
            continue
        if assignment.digest() not in seen:
            seen.add(assignment.digest())
            scored.append((_score(objective, assignment), number, assignment))
    if not scored:
        assert refused is not None
        raise refused
    scored.sort(key=lambda entry: entry[:2])
    if screening:
        for _, number, _ in scored[:_REFINED]:
            assignment = _assign(candidates[number], policy, options)
            scored.append((_score(objective, assignment), number, assignment))
    return min(scored, key=lambda entry: entry[:2])[2]


def _score(objective: Objective, assignment: Assignment) -> float:
    score = float(objective(assignment))
    if math.isnan(score):
        raise ConfigError(
            f"The objective returned {score}",
            limit="a number for every legal assignment",
            remedy="return math.inf for what must not be chosen",
        )
    return score


def _unevenness(assignment: Assignment) -> float:
    """Squared coefficients of variation of both modules, mean over replicas."""
    replicas = range(len(assignment.replicas))
    spread = [assignment.imbalance(m, r).cv ** 2 for m in ("encoder", "llm") for r in replicas]
    return math.fsum(spread) / len(assignment.replicas)


def _counts(num_microbatches: NumMicrobatches, problem: Problem) -> Sequence[int]:
    if isinstance(num_microbatches, tuple) and len(num_microbatches) == 2:
        low, high = num_microbatches
    elif num_microbatches == "auto":
        middle = max(1, problem.num_samples // problem.num_replicas) / 4
        low, high = max(1, math.floor(0.75 * middle)), max(1, math.ceil(1.25 * middle))
    elif isinstance(num_microbatches, str | tuple):
        raise ConfigError(
            f"num_microbatches is {num_microbatches!r}",
            limit="a number, a range (low, high) or 'auto'",
        )
    else:
        low = high = num_microbatches
    for value in (low, high):
        if not is_whole(value) or value < 1:
            raise ConfigError(
                f"num_microbatches is {num_microbatches!r}", limit="whole numbers of at least 1"
            )
    if low > high:
        raise ConfigError(f"num_microbatches is ({low}, {high})", limit="low <= high")
    # From the middle outwards: between equally good numbers the most usual one is taken.
    return sorted(range(int(low), int(high) + 1), key=lambda k: (abs(2 * k - low - high), -k))


def _check_options(policy: str, function: Policy, options: dict[str, Any]) -> None:
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{name} is set with policy {policy!r}",
                limit=f"its own options are: {', '.join(known) or 'none'}",
            )


def _check_cap(problem: Problem, assignment: Assignment) -> None:
    if problem.max_tokens is None:
        return
    for r, replica in enumerate(assignment.replicas):
        for module, entries in (("encoder", replica.encoder), ("LLM", replica.llm)):
            for k, entry in enumerate(entries):
                tokens = sum(problem.tokens[i] for i in entry)
                if tokens > problem.max_tokens:
                    raise AssignmentError(
                        f"Policy {assignment.policy!r} puts {tokens} tokens into {module} "
                        f"microbatch {k} of replica {r}",
                        limit=f"max_tokens is {problem.max_tokens}",
                        remedy="use policy='joint' or 'entrain', more microbatches or a larger cap",
                    )
