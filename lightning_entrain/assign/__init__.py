"""Which sample goes where: policies over the samples of one global batch. Pure: no torch, no I/O.

One file per algorithm, :data:`registry.POLICIES` names them, :func:`assign_samples` runs them.
"""

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.bounds import AssignmentBounds, LoadBound
from lightning_entrain.assign.measures import Imbalance, imbalance, peak, squared_deviations
from lightning_entrain.assign.ramps import trapezoid
from lightning_entrain.assign.registry import POLICIES
from lightning_entrain.assign.types import Assignment, Microbatches, ReplicaAssignment

__all__ = [
    "Assignment",
    "AssignmentBounds",
    "Imbalance",
    "LoadBound",
    "Microbatches",
    "POLICIES",
    "ReplicaAssignment",
    "assign_samples",
    "imbalance",
    "peak",
    "squared_deviations",
    "trapezoid",
]
