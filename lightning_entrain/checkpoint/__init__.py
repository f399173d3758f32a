"""Checkpoints: what is saved, how it is written, and how any layout reads it."""

from lightning_entrain.checkpoint.gather import TensorGather
from lightning_entrain.checkpoint.optimizer_state import (
    OptimizerLayout,
    check_names,
    full_optimizer_state,
    load_optimizer_state,
    prune_optimizer,
    record_layout,
)

__all__ = [
    "OptimizerLayout",
    "TensorGather",
    "check_names",
    "full_optimizer_state",
    "load_optimizer_state",
    "prune_optimizer",
    "record_layout",
]
