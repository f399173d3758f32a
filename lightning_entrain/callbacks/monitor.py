"""What the monitors have in common: when they look, and how they log."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.history import history_of


def step_index(trainer: pl.Trainer) -> int:
    """Optimizer step under way, from 0, as Lightning's loggers count it."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_ends(trainer: pl.Trainer) -> bool:
    """Whether the batch that was just trained ended an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


FIRST_LOOK = 3
"""The first step, counted from 0, that surely is not warming up."""


def is_due(step: int, every_n_steps: int) -> bool:
    """Whether a monitor looks at a step: every n, and at the first that is not warming up."""
    if every_n_steps == 1 or step == FIRST_LOOK:
        return True
    return step > FIRST_LOOK and step % every_n_steps == 0


def check_interval(every_n_steps: int) -> int:
    """An interval in steps.

    Raises:
        ConfigError: If it is below 1.
    """
    if every_n_steps < 1:
        raise ConfigError(f"every_n_steps is {every_n_steps}", limit="at least 1")
    return every_n_steps


class StepMonitor(Callback):
    """Logs values of a step once, to every logger, whatever the trainer's logging interval."""

    def log_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        values: Mapping[str, float],
        *,
        at_end_of: int | None = None,
    ) -> None:
        """Log values from ``on_train_batch_end``; every rank passes the same keys.

        From ``on_train_end``, `at_end_of` names the step that they are of.

        They reach `trainer.callback_metrics` too, for other callbacks to monitor. With gradient
        accumulation, the values of the step's last global batch are the ones logged.

        `pl_module.log` would do, but takes a fraction of a millisecond per key and step.
        """
        scalars = torch.tensor(list(values.values()), dtype=torch.float64).unbind()
        metrics = dict(zip(values, scalars, strict=True))
        trainer._logger_connector._callback_metrics.update(metrics)
        if at_end_of is None and not step_ends(trainer):
            return
        step = step_index(trainer) if at_end_of is None else at_end_of
        if trainer.is_global_zero:
            history_of(trainer).add(step, values)
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)
