"""How a pipeline job ends before its time: all ranks together, with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_entrain.checkpoint.saving import CheckpointingStrategy
from lightning_entrain.runtime.engine import PipelineEngine
from lightning_entrain.runtime.groups import PipelineGroups
from lightning_entrain.runtime.signals import EXIT_CODES, INTERRUPT, REQUEUE
from lightning_entrain.runtime.stop_together import StopTogether

INTERRUPTED = "interrupted.ckpt"
"""Name of the checkpoint that is saved when a job is asked to stop."""

_Result = TypeVar("_Result")


class StoppingStrategy(CheckpointingStrategy):
    """Turns a wish to stop on one rank into an end of all ranks after the same step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._engine: PipelineEngine | None = None
        self._groups = PipelineGroups()
        self._stop_together: StopTogether | None = None

    def on_train_start(self) -> None:
        """Share every rank's wish to stop while training runs."""
        super().on_train_start()
        if self._groups.control is not None and self.lightning_module is not None:
            self._stop_together = StopTogether(self.lightning_module.trainer, self._any_rank)

    def _heed_signals(self) -> None:
        """Only a pipeline can share a request; any other module is left to Lightning."""
        if self._engine is not None:
            super()._heed_signals()

    def _any_rank(self, wish: bool) -> bool:
        shared = torch.tensor(int(wish))
        self._together(dist.all_reduce, shared, dist.ReduceOp.MAX, group=self._groups.control)
        return bool(shared)

    def _told_to_all(self, step: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Run a step; if the ranks agreed to stop in it, let Lightning end the loop after it."""
        result = super()._told_to_all(step, *args, **kwargs)
        if self._engine is not None and self._engine.stop_agreed:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            # Gradients added up so far would be lost in the middle of an accumulation.
            if not (trainer.training and trainer.fit_loop.epoch_loop._should_accumulate()):
                trainer._signal_connector.received_sigterm = True
        return result

    def _save_and_leave(self) -> None:
        """All ranks come here after the same step."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        assert self._engine is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._stop_request is not None:
            self._stop_request.saving()
        self._write_at_once()
        if self._engine.stop_agreed == REQUEUE:
            handle = trainer._signal_connector._slurm_sigusr_handler_fn
            handle(signal.SIGUSR1, None)  # type: ignore[arg-type]
            return
        saver = trainer.checkpoint_callback
        if saver is None and self._engine.stop_agreed == INTERRUPT:
            rank_zero_info(f"Stopped on request after step {trainer.global_step}; not saved")
            return
        folder = getattr(saver, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, INTERRUPTED)
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(f"Stopped on request after step {trainer.global_step}; saved {path}")

    def on_exception(self, exception: BaseException) -> None:
        """Save if the ranks agreed to stop; otherwise tell the others, so that all end."""
        stopped = self._engine.stop_agreed if self._engine is not None else 0
        if stopped and isinstance(exception, SIGTERMException):
            self._save_and_leave()
            exception.code = EXIT_CODES[stopped]
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave the trainer's callbacks as they were."""
        if self._stop_together is not None:
            self._stop_together.remove()
            self._stop_together = None
        super().teardown()
