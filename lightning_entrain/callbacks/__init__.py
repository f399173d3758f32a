"""Lightning callbacks that show balance, speed, memory and the cost model; loaded lazily."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "BatchSizeAdvisor": "batch_size",
    "CostModelDriftMonitor": "drift",
    "MemoryMonitor": "memory",
    "PipelineTimelineMonitor": "timeline",
    "RunCheckpoint": "checkpoint",
    "RunReport": "report",
    "ThroughputMonitor": "throughput",
    "WorkloadVariabilityMonitor": "variability",
}

__all__ = [
    "BatchSizeAdvisor",
    "CostModelDriftMonitor",
    "MemoryMonitor",
    "PipelineTimelineMonitor",
    "RunCheckpoint",
    "RunReport",
    "ThroughputMonitor",
    "WorkloadVariabilityMonitor",
]

if TYPE_CHECKING:
    from lightning_entrain.callbacks.batch_size import BatchSizeAdvisor
    from lightning_entrain.callbacks.checkpoint import RunCheckpoint
    from lightning_entrain.callbacks.drift import CostModelDriftMonitor
    from lightning_entrain.callbacks.memory import MemoryMonitor
    from lightning_entrain.callbacks.report import RunReport
    from lightning_entrain.callbacks.throughput import ThroughputMonitor
    from lightning_entrain.callbacks.timeline import PipelineTimelineMonitor
    from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
