"""A wish to stop on one rank ends training on all of them, after the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class StopTogether(pl.Callback):
    """Shares ``trainer.should_stop`` over the ranks wherever Lightning looks at it next.

    A rank that left the loop alone would leave the others waiting for its messages. This goes
    behind the user's callbacks while training runs.

    Args:
        trainer: Gets this as its last callback.
        agree: Called on every rank with its wish; returns whether any rank has one.
    """

    def __init__(self, trainer: Any, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self._callbacks: list[pl.Callback] = trainer.callbacks
        self._callbacks.append(self)

    def remove(self) -> None:
        """Leave the trainer's callbacks as they were."""
        if self in self._callbacks:
            self._callbacks.remove(self)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """After the user's callbacks of a step."""
        self._share(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the user's callbacks of a validation."""
        self._share(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the user's callbacks of an epoch."""
        self._share(trainer)

    def _share(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = self._agree(trainer.should_stop)
