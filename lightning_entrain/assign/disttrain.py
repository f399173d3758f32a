"""Policy ``disttrain``: DistTrain-style reordering (arXiv 2408.04275), from secondary sources.

Samples go to replicas by longest processing time first. Within a replica they form microbatches in
sampler order; only the order of the microbatches is chosen, so that the first stage idles little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_entrain.assign.numbers import loads_of
from lightning_entrain.assign.problem import Problem
from lightning_entrain.assign.replicas import split_by_size
from lightning_entrain.assign.runs import even_runs
from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ConfigError


def assign_disttrain(problem: Problem, *, num_stages: int = 8) -> tuple[ReplicaAssignment, ...]:
    """Balance replicas by size, then reorder each replica's microbatches.

    Args:
        problem: The global batch.
        num_stages: Stages of the pipeline (p), which says how many small microbatches are kept
            for the end.

    Raises:
        ConfigError: If ``num_stages`` is below 1.
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages is {num_stages}", limit="at least 1")
    replicas = []
    for samples in split_by_size(problem):
        runs = even_runs(0, len(samples), problem.num_microbatches)
        llm = [tuple(samples[start:stop]) for start, stop in runs]
        encoder_loads = loads_of(problem.encoder_cost, llm)
        llm_loads = loads_of(problem.llm_cost, llm)
        order = reorder(encoder_loads, llm_loads, num_stages)
        llm = [llm[k] for k in order]
        encoder = [tuple(i for i in entry if problem.has_image(i)) for entry in llm]
        replicas.append(ReplicaAssignment(encoder=tuple(encoder), llm=tuple(llm)))
    return tuple(replicas)


def reorder(
    encoder_loads: Sequence[float], llm_loads: Sequence[float], num_stages: int
) -> list[int]:
    """Order of microbatches: smallest first, the p-1 smallest of the rest last.

    In between comes repeatedly the microbatch whose forward on the first stage is nearest to the
    first stage's current idle interval: from when it has run what it has to when the gradient of
    the oldest microbatch in flight comes back. That gradient is taken to meet no queue on its way,
    the stages of a module (half of them each) to share its work evenly, and backwards to take
    twice their forwards.

    Args:
        encoder_loads: Forward cost per microbatch.
        llm_loads: Likewise, in the same unit.
        num_stages: Stages of the pipeline (p).

    Returns:
        Indices in execution order.
    """
    sizes = [e + m for e, m in zip(encoder_loads, llm_loads, strict=True)]
    first_stage = [load / max(1, num_stages // 2) for load in encoder_loads]
    ascending = sorted(range(len(sizes)), key=lambda k: (sizes[k], k))
    num_last = num_stages - 1
    order, last, rest = ascending[:1], ascending[1 : 1 + num_last], ascending[1 + num_last :]
    in_flight: deque[tuple[int, float]] = deque()
    clock = 0.0

    def run(k: int) -> None:
        nonlocal clock
        clock += first_stage[k]
        # Forward through the later stages, then backward through them.
        in_flight.append((k, clock + 3 * sizes[k] - 3 * first_stage[k]))
        if len(in_flight) >= num_stages:
            oldest, returned = in_flight.popleft()
            clock = max(clock, returned) + 2 * first_stage[oldest]

    if order:
        run(order[0])
    while rest:
        idle = max(0.0, in_flight[0][1] - clock) if in_flight else 0.0
        nearest = min(rest, key=lambda k: (abs(first_stage[k] - idle), k))
        rest.remove(nearest)
        order.append(nearest)
        run(nearest)
    return order + last
