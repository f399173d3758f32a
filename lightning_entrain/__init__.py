"""Heterogeneous pipeline training of multimodal LLMs on PyTorch Lightning.

Public names load lazily, so that ``import lightning_entrain`` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_entrain._registration import register_when_lightning_is_there

__version__ = "0.1.0"

_HOMES = {
    "Assignment": "lightning_entrain.assign.types",
    "EntrainDataModule": "lightning_entrain.datamodule",
    "EntrainModel": "lightning_entrain.models.entrain_model",
    "EntrainStrategy": "lightning_entrain.strategy",
    "WorkloadVariabilityMonitor": "lightning_entrain.callbacks.variability",
}

__all__ = [
    "Assignment",
    "EntrainDataModule",
    "EntrainModel",
    "EntrainStrategy",
    "WorkloadVariabilityMonitor",
    "__version__",
]

if TYPE_CHECKING:
    from lightning_entrain.assign.types import Assignment
    from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor
    from lightning_entrain.datamodule import EntrainDataModule
    from lightning_entrain.models.entrain_model import EntrainModel
    from lightning_entrain.strategy import EntrainStrategy


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_lightning_is_there()
