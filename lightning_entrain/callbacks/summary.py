"""Keeps what a run's closing summary tells."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class RunSummary(Callback):
    """Counts samples, tokens and time of a fit, and keeps its first and last loss.

    It logs nothing. Rates leave out the first step, which pays for warming up, and whatever
    happens between training steps (validation, checkpoints).
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0
        self.train_seconds = 0.0
        self._timed_samples = 0
        self._timed_tokens = 0
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop the clock and count."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._last = loss.detach()
            if self._first is None:
                self._first = self._last
        if self.num_steps:
            self.train_seconds += time.perf_counter() - self._started
            self._timed_samples += batch.num_samples
            self._timed_tokens += batch.num_tokens
        self.num_steps += 1
        self.num_samples += batch.num_samples
        self.num_tokens += batch.num_tokens

    @property
    def first_loss(self) -> float | None:
        """Training loss of the first step, or None before it."""
        return None if self._first is None else float(self._first)

    @property
    def last_loss(self) -> float | None:
        """Training loss of the last step, or None before the first."""
        return None if self._last is None else float(self._last)

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second, or None with fewer than two steps."""
        return self._timed_samples / self.train_seconds if self.train_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Vision and text tokens of the LLM per second, or None with fewer than two steps."""
        return self._timed_tokens / self.train_seconds if self.train_seconds else None
