"""What the samples of a trained batch cost, in milliseconds where the model is known."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl

from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.planning import Workload, workload_of
from lightning_entrain.workload.tables import SizeTable


class BatchCosts:
    """Costs of a run's batches, the same with `EntrainStrategy` and on one process without it.

    Args:
        trainer: The trainer, set up.
        pl_module: Its module.

    Attributes:
        workload: What samples cost; None for models that are not built from Hugging Face
            configurations.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self.workload: Workload | None = getattr(strategy, "workload", None)
        datamodule = getattr(trainer, "datamodule", None)
        # The data module assigns by the strategy's costs, so its batches hold them already.
        self._module = ref(pl_module)
        self._last: tuple[Any, Assignment] | None = None
        self._last_table: tuple[Any, SizeTable] | None = None
        self._batches_hold_them = (
            getattr(strategy, "sample_costs", None) is not None
            and type(datamodule).__name__ == "EntrainDataModule"
        )
        if self.workload is None:
            models = [part for part in pl_module.modules() if isinstance(part, EntrainModel)]
            if len(models) == 1 and not hasattr(strategy, "workload"):
                self.workload = workload_of(models[0], strategy.root_device)

    @property
    def in_milliseconds(self) -> bool:
        """Whether costs are predicted milliseconds, and not patches and tokens."""
        return self.workload is not None

    def assignment_of(self, batch: Any) -> Assignment:
        """The batch's assignment with its samples' costs.

        Costs are predicted milliseconds, forward and backward, or, where the model is unknown,
        patches in the encoder and tokens in the LLM.

        Raises:
            ConfigError: If the batch does not say how it was planned.
        """
        assignment, sizes = planned_parts(batch)
        if (
            self._batches_hold_them
            and self.workload is not None
            and assignment.encoder_cost is not None
        ):
            return assignment
        if self._last is None or self._last[0] is not sizes:
            table = self.table_of(batch)
            costs = table_costs(table) if self.workload is None else self.workload.costs_of(table)
            self._last = sizes, assignment.with_costs(*costs)
        return self._last[1]

    def table_of(self, batch: Any) -> SizeTable:
        """The sizes of the batch's samples as arrays."""
        sizes = batch.sizes
        if self._last_table is None or self._last_table[0] is not sizes:
            make = SizeTable.from_sizes if self.workload is None else self.workload.table
            self._last_table = sizes, make(sizes)
        return self._last_table[1]

    @classmethod
    def shared(cls, trainer: pl.Trainer, pl_module: pl.LightningModule) -> BatchCosts:
        """One object for all monitors of a fit, so that each batch is looked at once."""
        known = _shared.get(trainer)
        workload = getattr(trainer.strategy, "workload", None)
        if (
            known is None
            or known._module() is not pl_module
            or (workload is not None and known.workload is not workload)
        ):
            known = _shared[trainer] = cls(trainer, pl_module)
        return known


_shared: WeakKeyDictionary[pl.Trainer, BatchCosts] = WeakKeyDictionary()


def table_costs(table: SizeTable) -> tuple[list[float], list[float]]:
    """Patches and LLM tokens per sample of a table."""
    return table.num_patches.astype(float).tolist(), table.num_tokens.astype(float).tolist()


def planned_parts(batch: Any) -> tuple[Assignment, Any]:
    """Assignment and sizes of a planned batch.

    Raises:
        ConfigError: If the batch has neither.
    """
    if not (hasattr(batch, "assignment") and hasattr(batch, "sizes")):
        raise ConfigError(
            f"A monitor got a batch of type {type(batch).__name__}",
            limit="a batch with the attributes assignment and sizes",
            remedy="train with EntrainDataModule, or leave the callback out",
        )
    return batch.assignment, batch.sizes
