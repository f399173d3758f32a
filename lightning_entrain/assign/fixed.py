"""Policy ``fixed``: samples stay in sampler order, the baseline of the paper's evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_entrain.assign.runs import even_runs
from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.errors import AssignmentError


def assign_fixed(
    has_images: Sequence[bool], *, num_replicas: int, num_microbatches: int
) -> Assignment:
    """Cut the global batch into replicas, and those into microbatches, in sampler order.

    Args:
        has_images: Per sample of the global batch whether it has encoder work. Samples without
            appear in the LLM microbatches alone.
        num_replicas: Data-parallel replicas. Each takes a contiguous run of samples.
        num_microbatches: Microbatches per replica (K). Sizes differ by at most one sample; with
            fewer samples than microbatches some entries are empty.

    Returns:
        An assignment without deferral (lag 0): encoder and LLM microbatches hold the same samples.

    Raises:
        AssignmentError: If a count is below 1.
    """
    for name, value in (("num_replicas", num_replicas), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise AssignmentError(f"{name} is {value}", limit="at least 1", remedy=f"set {name}=1")
    replicas = []
    for start, stop in even_runs(0, len(has_images), num_replicas):
        llm = tuple(tuple(range(a, b)) for a, b in even_runs(start, stop, num_microbatches))
        encoder = tuple(tuple(i for i in entry if has_images[i]) for entry in llm)
        replicas.append(ReplicaAssignment(encoder=encoder, llm=llm))
    return Assignment(replicas=tuple(replicas), policy="fixed")
