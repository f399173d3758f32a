"""The options of `entrain-train`: structured configs for Hydra, each with its range and meaning.

OmegaConf checks names and types when a config is composed; `validate` then checks ranges, and what
has to fit together. The same fields generate docs/configuration.md (see `config_reference.py`).
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from lightning_entrain.config_check import num_devices, validate
from lightning_entrain.config_option import describe_range, option
from lightning_entrain.config_outputs import (
    BatchSizeConf,
    CheckpointConf,
    CsvLoggerConf,
    DriftConf,
    MemoryConf,
    ReportConf,
    ThroughputConf,
    TimelineConf,
    VariabilityConf,
    WandbLoggerConf,
)
from lightning_entrain.config_schemas import (
    ChartSourceConf,
    EntrainStrategyConf,
    FolderSourceConf,
    ModuleConf,
    PlannedDataConf,
    SingleStrategyConf,
    SyntheticSourceConf,
    TinyVlmConf,
    TrainConf,
    TrainerConf,
)

__all__ = [
    "GROUPS",
    "TrainConf",
    "BatchSizeConf",
    "ChartSourceConf",
    "CheckpointConf",
    "CsvLoggerConf",
    "DriftConf",
    "EntrainStrategyConf",
    "FolderSourceConf",
    "MemoryConf",
    "ModuleConf",
    "PlannedDataConf",
    "ReportConf",
    "SingleStrategyConf",
    "SyntheticSourceConf",
    "ThroughputConf",
    "TimelineConf",
    "TinyVlmConf",
    "TrainerConf",
    "VariabilityConf",
    "WandbLoggerConf",
    "describe_range",
    "num_devices",
    "option",
    "register_configs",
    "single_device",
    "validate",
]


def single_device() -> str:
    """Lightning's own strategy for one device."""
    return "auto"


GROUPS: dict[str, dict[str, type]] = {
    "data": {"planned": PlannedDataConf},
    "source": {
        "charts": ChartSourceConf,
        "folder": FolderSourceConf,
        "synthetic": SyntheticSourceConf,
    },
    "model": {"tiny_vlm": TinyVlmConf},
    "strategy": {"entrain": EntrainStrategyConf, "single": SingleStrategyConf},
    "logger": {"csv": CsvLoggerConf, "wandb": WandbLoggerConf},
    "callbacks": {
        "variability": VariabilityConf,
        "timeline": TimelineConf,
        "throughput": ThroughputConf,
        "memory": MemoryConf,
        "drift": DriftConf,
        "batch_size": BatchSizeConf,
        "report": ReportConf,
        "checkpoint": CheckpointConf,
    },
}


def register_configs() -> None:
    """Put the structured configs where the files in conf/ refer to them: the group schema/."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConf)
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
