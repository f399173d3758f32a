"""Tells whether the global batch is large enough for its plan to be stable."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_entrain.callbacks.monitor import StepMonitor
from lightning_entrain.errors import EntrainError
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.wandb_log import define_sections


class BatchSizeAdvisor(StepMonitor):
    """Compares the global batch with b_min, the smallest batch whose split is stable.

    b_min comes from the plan, or, without one, from profiling the training samples on rank 0
    (Entrain, section 4.2, Algorithm 1, arXiv 2605.27918). A smaller global batch is legal; single
    steps may then need another split of the ranks than the plan's. Logged at the first step:

    | key | meaning | unit |
    | --- | --- | --- |
    | `plan/global_batch_size` | samples per batch, all replicas | samples |
    | `plan/b_min` | smallest batch with a stable split; absent where costs are unknown | samples |
    | `plan/batch_over_b_min` | the first over the second | none |

    Attributes:
        b_min: What was found; None where costs are unknown.
        text: The advice in words; empty where there is none.
        num_train_samples: Samples of the training data on rank 0; 0 where that is unknown.
    """

    def __init__(self) -> None:
        self.b_min: int | None = None
        self.text = ""
        self.num_train_samples = 0
        self._logged = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find b_min on rank 0."""
        define_sections(trainer)
        self._logged = False
        found = None
        if trainer.is_global_zero:
            found = _b_min(trainer, pl_module)
            self.num_train_samples = _num_train_samples(trainer)
        self.b_min = trainer.strategy.broadcast(found)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log and advise once."""
        if self._logged:
            return
        self._logged = True
        size = int(batch.num_samples)
        values = {"plan/global_batch_size": float(size)}
        if self.b_min is not None:
            values["plan/b_min"] = float(self.b_min)
            values["plan/batch_over_b_min"] = size / self.b_min
            self.text = batch_size_text(size, self.b_min, self.num_train_samples)
            # Of a plan that knows b_min, the strategy has told already.
            if self.text and getattr(_plan(trainer), "b_min", None) is None:
                rank_zero_info(f"BatchSizeAdvisor: {self.text}")
        self.log_step(trainer, pl_module, values)


def batch_size_text(global_batch_size: int, b_min: int, num_train_samples: int = 0) -> str:
    """Advice in words; empty where the batch is large enough, or the data is too small.

    Args:
        global_batch_size: In use.
        b_min: Smallest batch with a stable split.
        num_train_samples: Of the training data; 0 if unknown.
    """
    if global_batch_size >= b_min or 0 < num_train_samples < b_min:
        return ""
    return (
        f"A global batch of {global_batch_size} samples is smaller than b_min, {b_min}: the "
        "modules' shares of the work differ from batch to batch so much that no single split of "
        f"the ranks suits all of them. From {b_min} samples on one split does."
    )


def _b_min(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int | None:
    plan = _plan(trainer)
    if plan is not None and plan.b_min is not None:
        return int(plan.b_min)
    workload = BatchCosts.shared(trainer, pl_module).workload
    datamodule: Any = getattr(trainer, "datamodule", None)
    if workload is None or not hasattr(datamodule, "train_sizes"):
        return None
    ranks = max(2, trainer.world_size // getattr(trainer.strategy, "num_replicas", 1))
    try:
        return int(workload.profile(datamodule.train_sizes(), ranks).b_min.b_min)
    except EntrainError:  # no work to share out: there is nothing to advise
        return None


def _num_train_samples(trainer: pl.Trainer) -> int:
    datamodule: Any = getattr(trainer, "datamodule", None)
    if hasattr(datamodule, "part"):  # whose `train_sizes` are some of them
        return len(datamodule.part("train"))
    return len(datamodule.train_sizes()) if hasattr(datamodule, "train_sizes") else 0


def _plan(trainer: pl.Trainer) -> Any:
    return getattr(trainer.strategy, "plan", None)
