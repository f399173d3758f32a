"""Logs how unevenly the microbatches of each step are loaded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.spread import Spread, microbatch_loads


class WorkloadVariabilityMonitor(Callback):
    """Logs the spread of tokens over microbatches, every training step, to every logger.

    The spread is taken over all microbatches of the global batch, all replicas together, in the
    manner of the paper's Table 3 (Entrain, section 6, arXiv 2605.27918) with tokens in place of
    milliseconds. An empty microbatch counts as 0 tokens. With gradient accumulation, the last
    global batch of the step is the one logged.

    | key | meaning | unit |
    | --- | --- | --- |
    | `variability/encoder_cv` | std / mean over encoder microbatches | none |
    | `variability/encoder_std` | standard deviation over encoder microbatches | patches |
    | `variability/llm_cv` | std / mean over LLM microbatches | none |
    | `variability/llm_std` | standard deviation over LLM microbatches | tokens |

    The values are known on every rank from the sizes alone, so nothing is communicated. They are
    also in `trainer.callback_metrics`, for other callbacks to monitor.
    """

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the spread of the batch that was just trained.

        Raises:
            ConfigError: If the batch does not say how it was planned.
        """
        values = self.measure(batch)
        # Values that go through `log` share the step's row with the loss. Between two logging
        # steps Lightning would keep them to itself, so there they are written directly.
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        if trainer._logger_connector.should_update_logs or trainer.fit_loop._should_accumulate():
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    @staticmethod
    def measure(batch: Any) -> dict[str, float]:
        """The values logged for one planned batch, by key.

        Args:
            batch: A batch with `assignment` and `sizes`, as `EntrainDataModule` yields it.

        Raises:
            ConfigError: If the batch has neither.
        """
        if not (hasattr(batch, "assignment") and hasattr(batch, "sizes")):
            raise ConfigError(
                f"WorkloadVariabilityMonitor got a batch of type {type(batch).__name__}",
                limit="a batch with the attributes assignment and sizes",
                remedy="train with EntrainDataModule, or leave the callback out",
            )
        loads = microbatch_loads(batch.assignment, batch.sizes)
        encoder, llm = Spread.of(loads.encoder), Spread.of(loads.llm)
        return {
            "variability/encoder_cv": encoder.cv,
            "variability/encoder_std": encoder.std,
            "variability/llm_cv": llm.cv,
            "variability/llm_std": llm.std,
        }
