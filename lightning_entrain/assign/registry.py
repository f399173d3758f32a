"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from lightning_entrain.assign.dip import assign_dip
from lightning_entrain.assign.disttrain import assign_disttrain
from lightning_entrain.assign.entrain import assign_entrain
from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.assign.joint import assign_joint
from lightning_entrain.assign.problem import Problem
from lightning_entrain.assign.types import ReplicaAssignment

Policy = Callable[..., tuple[ReplicaAssignment, ...]]
"""Takes a Problem and the policy's own options by keyword."""


def _fixed(problem: Problem) -> tuple[ReplicaAssignment, ...]:
    return assign_fixed(
        [cost > 0 for cost in problem.encoder_cost],
        num_replicas=problem.num_replicas,
        num_microbatches=problem.num_microbatches,
    ).replicas


POLICIES: dict[str, Policy] = {
    "fixed": _fixed,
    "disttrain": assign_disttrain,
    "dip": assign_dip,
    "entrain": assign_entrain,
    "joint": assign_joint,
}
"""Add an entry to add a policy."""
