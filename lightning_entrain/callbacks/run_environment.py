"""What a report tells of the run itself: versions, device, data, model, seed, schedule."""

from __future__ import annotations

import os
import platform
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_entrain.runtime.multirun import under_hydra


def run_environment(trainer: pl.Trainer) -> dict[str, str]:
    """Names and values; what is unknown is left out."""
    from lightning_entrain import __version__

    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        **_setting(trainer),
        "lightning_entrain": __version__,
        "lightning": pl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": name,
        "processes": str(trainer.world_size),
        "precision": str(trainer.precision),
    }


def _setting(trainer: pl.Trainer) -> dict[str, str]:
    datamodule: Any = getattr(trainer, "datamodule", None)
    shape, planner = getattr(datamodule, "shape", None), _planner(trainer)
    source = getattr(datamodule, "source", None)
    found: dict[str, Any] = {
        "data": None if source is None else type(source).__name__,
        "model": type(trainer.lightning_module).__name__,
        "global batch size": getattr(shape, "global_batch_size", None),
        "microbatches per replica": getattr(shape, "num_microbatches", None),
        "schedule": getattr(planner, "schedule", None),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "data seed": getattr(datamodule, "seed", None),
        **_chosen(),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _planner(trainer: pl.Trainer) -> Any:
    try:
        return getattr(trainer.strategy, "step_planner", None)
    except RuntimeError:  # failed before the layout was known
        return None


def _chosen() -> dict[str, str]:
    """Data and model as the user of `entrain-train` chose them."""
    if not under_hydra():
        return {}
    from hydra.core.hydra_config import HydraConfig

    choices = HydraConfig.get().runtime.choices
    return {name: str(choices[name]) for name in ("data", "model") if choices.get(name)}
