"""Checkpoints of a run, one of them at its last step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that also writes `last.ckpt` when the trainer's last step is done.

    Lightning's own saves where it validates, so a run of 12 steps that validates every 20 would
    leave nothing. Names carry no version number: a run in the same folder replaces them. All
    arguments are those of `ModelCheckpoint`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("enable_version_counter", False)
        kwargs.setdefault("auto_insert_metric_name", False)
        super().__init__(*args, **kwargs)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save as `ModelCheckpoint` does, and at the last step in any case."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        ended = 0 < trainer.max_steps <= trainer.global_step
        if not (ended and self.save_last) or self._should_skip_saving_checkpoint(trainer):
            return
        saved_before = self._last_global_step_saved
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        # A validation of this very step may still find it the best.
        self._last_global_step_saved = saved_before
