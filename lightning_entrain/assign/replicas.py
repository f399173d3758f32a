"""Samples to replicas (paper, section 3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_entrain.assign.numbers import integer_units
from lightning_entrain.assign.problem import Problem


def split_greedy(problem: Problem) -> list[list[int]]:
    """Heaviest in the encoder first, each to the replica with the least LLM load so far.

    A replica takes no more than its share of samples where ``problem.equal_counts``.

    Returns:
        Per replica its samples, in ``problem.order``.
    """
    return _least_loaded(problem, problem.order, problem.llm_units)


def split_by_size(problem: Problem) -> list[list[int]]:
    """Longest processing time first: largest total cost first, to the lightest replica.

    The total is encoder plus LLM cost in the unit they were given in.

    Returns:
        Per replica its samples, in sampler order.
    """
    scale = 2 * max(max(problem.encoder_cost, default=0.0), max(problem.llm_cost, default=0.0))
    if scale == 0:
        sizes = [0.0] * problem.num_samples
    else:  # Scaled, so that the sum of two costs cannot overflow.
        sizes = [
            encoder / scale + llm / scale
            for encoder, llm in zip(problem.encoder_cost, problem.llm_cost, strict=True)
        ]
    units = integer_units(sizes)
    order = sorted(range(problem.num_samples), key=lambda i: (-sizes[i], i))
    return [sorted(samples) for samples in _least_loaded(problem, order, units)]


def _least_loaded(problem: Problem, order: Sequence[int], units: Sequence[int]) -> list[list[int]]:
    replicas: list[list[int]] = [[] for _ in range(problem.num_replicas)]
    heap = [(0, 0, r) for r in range(problem.num_replicas)]
    for i in order:
        load, count, r = heap[0]
        replicas[r].append(i)
        if count + 1 < problem.replica_capacity:
            heapq.heapreplace(heap, (load + units[i], count + 1, r))
        else:
            heapq.heappop(heap)
    return replicas
