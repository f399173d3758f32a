"""Policy ``entrain``: the paper's hierarchical assignment (sections 3 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from lightning_entrain.assign.deferral import OddRule, defer_pairwise
from lightning_entrain.assign.problem import Problem, place
from lightning_entrain.assign.replicas import split_greedy
from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import AssignmentError, ConfigError


def assign_entrain(
    problem: Problem,
    *,
    threshold_quantile: float = 0.5,
    odd: OddRule = "alone",
    max_sums: int = 4096,
) -> tuple[ReplicaAssignment, ...]:
    """Replicas by least LLM load, stratified encoder microbatches, pairwise deferral.

    Args:
        problem: The global batch.
        threshold_quantile: Samples with an LLM cost above this quantile of their replica's are
            placed first (S_c in the paper, which leaves the threshold open). The median by default.
        odd: What an odd number of microbatches does with the middle one in the pairing.
        max_sums: See :func:`deferral.defer_pairwise`.

    Raises:
        AssignmentError: If the token cap leaves no room.
        ConfigError: If an option is out of range.
    """
    if problem.ramp is not None:
        raise ConfigError(
            "ramp is set with policy 'entrain'",
            limit="the paper's algorithm knows equal microbatches only",
            remedy="use policy='joint'",
        )
    if not 0 <= threshold_quantile <= 1:
        raise ConfigError(f"threshold_quantile is {threshold_quantile}", limit="between 0 and 1")
    if odd not in ("alone", "lower"):
        raise ConfigError(f"odd is {odd!r}", limit="'alone' or 'lower'")
    if max_sums < 4:
        raise ConfigError(f"max_sums is {max_sums}", limit="at least 4")
    return tuple(
        entrain_replica(
            problem, samples, threshold_quantile=threshold_quantile, odd=odd, max_sums=max_sums
        )
        for samples in split_greedy(problem)
    )


def entrain_replica(
    problem: Problem,
    samples: Sequence[int],
    *,
    threshold_quantile: float = 0.5,
    odd: OddRule = "alone",
    max_sums: int = 4096,
) -> ReplicaAssignment:
    """Assign one replica's samples; see :func:`assign_entrain`.

    Args:
        problem: The global batch.
        samples: The replica's, in ``problem.order``.
        threshold_quantile: See :func:`assign_entrain`.
        odd: Likewise.
        max_sums: Likewise.
    """
    bins, num_images = _stratify_in_room(problem, samples, threshold_quantile)
    encoder = [sorted(entry[:count]) for entry, count in zip(bins, num_images, strict=True)]
    if problem.max_lag == 0:
        llm = [sorted(entry) for entry in bins]
        return _record(encoder, llm)
    plan = defer_pairwise(
        [[problem.llm_units[i] for i in entry] for entry in bins],
        tokens=[[problem.tokens[i] for i in entry] for entry in bins],
        max_tokens=problem.max_tokens,
        odd=odd,
        max_sums=max_sums,
    )
    llm = [list(entry) for entry in bins]
    for i, j, deferred in plan.pairs:
        moved = [bins[i][position] for position in deferred]
        gone = set(moved)
        llm[i] = [sample for sample in bins[i] if sample not in gone]
        llm[j] = llm[j] + moved
    order = plan.order
    return _record([encoder[k] for k in order], [sorted(llm[k]) for k in order])


def stratify(
    problem: Problem, samples: Sequence[int], num_bins: int, threshold_quantile: float = 0.5
) -> tuple[list[list[int]], list[int]]:
    """Samples to microbatches with even encoder loads (paper, section 5.1).

    Samples heavy in the LLM are placed first, then the rest, each by encoder cost descending into
    the microbatch with the least encoder load so far. Text-only samples follow, which the paper
    does not have: by LLM cost descending into the microbatch with the least LLM load so far.

    Returns:
        Samples per microbatch, and how many of each (the first ones) have images.
    """
    images, texts = problem.split_images(samples)
    units = problem.llm_units
    threshold = _quantile([units[i] for i in images], threshold_quantile)
    heavy = [i for i in images if units[i] > threshold]
    light = [i for i in images if units[i] <= threshold]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    place(problem, heavy + light, problem.encoder_units, bins, [0] * num_bins, tokens)
    num_images = [len(entry) for entry in bins]
    if texts:
        loads = [sum(units[i] for i in entry) for entry in bins]
        texts.sort(key=lambda i: -units[i])
        place(problem, texts, units, bins, loads, tokens)
    return bins, num_images


def _stratify_in_room(
    problem: Problem, samples: Sequence[int], threshold_quantile: float
) -> tuple[list[list[int]], list[int]]:
    """Stratify into K_eff microbatches, or into as many more up to K as the token cap needs."""
    num_bins = problem.effective_microbatches(samples)
    if problem.max_tokens:
        needed = -(-sum(problem.tokens[i] for i in samples) // problem.max_tokens)
        num_bins = min(problem.num_microbatches, max(num_bins, needed))
    while True:
        try:
            return stratify(problem, samples, num_bins, threshold_quantile)
        except AssignmentError:
            if num_bins >= problem.num_microbatches:
                raise
            num_bins += 1


def _quantile(values: Sequence[int], quantile: float) -> Fraction:
    """Linear between the order statistics, exact; the median for 0.5."""
    if not values:
        return Fraction(0)
    ordered = sorted(values)
    position = Fraction(quantile) * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _record(encoder: Sequence[list[int]], llm: Sequence[list[int]]) -> ReplicaAssignment:
    return ReplicaAssignment(
        encoder=tuple(tuple(entry) for entry in encoder),
        llm=tuple(tuple(entry) for entry in llm),
    )
