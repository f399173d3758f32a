"""Logs each rank's peak memory, beside what the plan predicted."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_entrain.callbacks.monitor import (
    StepMonitor,
    check_interval,
    is_due,
    step_ends,
    step_index,
)
from lightning_entrain.observe.wandb_log import define_sections

_GIB = 2**30


class MemoryMonitor(StepMonitor):
    """Logs peak memory since the start of the fit, every n steps.

    On CUDA it is what torch allocated at most. On a CPU it is the process's peak resident size,
    libraries and data included, which no plan predicts: there the predicted keys are left out.

    | key | meaning | unit |
    | --- | --- | --- |
    | `memory/rank<r>_peak_gib` | peak of rank r | GiB |
    | `memory/max_peak_gib` | the largest of them | GiB |
    | `memory/predicted_peak_gib` | largest stage of the plan | GiB |
    | `memory/peak_over_predicted` | largest peak / largest prediction | none |

    Args:
        every_n_steps: Steps between two looks; the first is at step 3, counted from 0.

    Attributes:
        peaks_gib: Rank 0: the last look, by global rank.

    Raises:
        ConfigError: If the interval is below 1.
    """

    def __init__(self, every_n_steps: int = 20) -> None:
        self.every_n_steps = check_interval(every_n_steps)
        self.peaks_gib: list[float] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting anew."""
        define_sections(trainer)
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look where it is due."""
        if not step_ends(trainer) or not is_due(step_index(trainer), self.every_n_steps):
            return
        values = trainer.strategy.broadcast(self._look(trainer))
        if values:
            self.log_step(trainer, pl_module, values)

    def _look(self, trainer: pl.Trainer) -> dict[str, float]:
        own = peak_gib(trainer.strategy.root_device)
        gather = getattr(trainer.strategy, "gather_on_rank_zero", None)
        if gather is None and trainer.world_size > 1:
            peaks = None  # each rank of another strategy knows its own alone
        else:
            peaks = [own] if gather is None else gather(own)
        if peaks is None:
            return {"memory/rank0_peak_gib": own} if gather is None else {}
        self.peaks_gib = list(peaks)
        values = {f"memory/rank{rank}_peak_gib": peak for rank, peak in enumerate(peaks)}
        values["memory/max_peak_gib"] = max(peaks)
        predicted = predicted_gib(trainer)
        if predicted:
            values["memory/predicted_peak_gib"] = max(predicted)
            values["memory/peak_over_predicted"] = max(peaks) / max(predicted)
        return values


def peak_gib(device: torch.device) -> float:
    """Peak memory of this process on its device, GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


def predicted_gib(trainer: pl.Trainer) -> list[float]:
    """Predicted memory per rank of a replica, GiB; empty without a plan and on a CPU."""
    plan = getattr(trainer.strategy, "plan", None)
    if plan is None or trainer.strategy.root_device.type != "cuda":
        return []
    found = [0.0] * plan.placement.num_ranks
    for rank, stage in zip(plan.placement.stage_to_rank, plan.stages, strict=False):
        found[rank] += stage.memory_gib
    return found
