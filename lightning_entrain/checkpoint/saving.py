"""The part of the strategy that saves and loads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_entrain.checkpoint import random_state
from lightning_entrain.checkpoint.files import EntrainCheckpointIO, existing, local_path
from lightning_entrain.checkpoint.gather import TensorGather, copy_to_host
from lightning_entrain.checkpoint.loops import mend_epoch_end
from lightning_entrain.checkpoint.model_record import model_record
from lightning_entrain.checkpoint.optimizer_state import (
    OptimizerLayout,
    check_names,
    full_optimizer_state,
    load_optimizer_state,
)
from lightning_entrain.checkpoint.sharded import (
    MODEL,
    RECORD,
    is_sharded,
    read_sharded,
    require_success,
    split,
    write_sharded,
)
from lightning_entrain.checkpoint.write_queue import WriteQueue
from lightning_entrain.errors import CheckpointError, ConfigError
from lightning_entrain.runtime.groups import PipelineGroups
from lightning_entrain.runtime.partition import ModelPartition
from lightning_entrain.runtime.ranks import RankStrategy
from lightning_entrain.runtime.ties import TiedCopies

FORMATS = ("consolidated", "sharded")


class CheckpointingStrategy(RankStrategy):
    """Saves and loads what the ranks hold, as one file or as a folder of shards.

    Either kind names tensors as the full model does, so that every layout reads it. Also saves the
    states of all ranks' random number generators.

    Args:
        checkpoint: ``"consolidated"`` or ``"sharded"``: what is written. Both are read.
        async_checkpoint: Write in the background while training goes on.
        options: As of :class:`RankStrategy`.
    """

    _groups: PipelineGroups
    _optimizer_layouts: list[OptimizerLayout]
    _one_stage: bool
    _tied: TiedCopies | None

    def __init__(self, *, checkpoint: str, async_checkpoint: bool, **options: Any) -> None:
        if checkpoint not in FORMATS:
            raise ConfigError(f"checkpoint is {checkpoint!r}", limit=" or ".join(FORMATS))
        super().__init__(**options)
        self._sharded = checkpoint == "sharded"
        self._asynchronous = async_checkpoint
        self._queue = WriteQueue()
        self._queued_path: _PATH | None = None
        self._write_group: dist.ProcessGroup | None = None
        self._random_state: random_state.State | None = None

    @property
    def _partition(self) -> ModelPartition:
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes consolidated files; Lightning's plugins may replace it."""
        if self._checkpoint_io is None:
            self._checkpoint_io = EntrainCheckpointIO(memory_map=self.is_distributed)
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = EntrainCheckpointIO()  # unless it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None and self._sharded and not isinstance(io, EntrainCheckpointIO):
            raise ConfigError(
                f'checkpoint="sharded" with a {type(io).__name__}',
                limit="shards are written by torch.distributed.checkpoint",
                remedy='use checkpoint="consolidated" with this plugin',
            )
        self._checkpoint_io = io

    # --- what this rank holds ---------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full model's state dict on rank 0; on other ranks, and for shards, a part of it."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        if self._one_stage or not self.is_distributed:
            return own
        partition = self._partition
        own = partition.own_state(own, self.global_rank, second_copies=self._sharded)
        collected = self._gather()(own)
        if not self._sharded:
            partition.add_second_copies(collected)
        return {name: collected[name] for name in self._partition.full_names if name in collected}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's single-device state dict; complete on rank 0, for shards nowhere."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._one_stage or not self.is_distributed:
            return optimizer.state_dict()
        index = [id(known) for known in self.optimizers].index(id(optimizer))
        return full_optimizer_state(
            optimizer,
            self._optimizer_layouts[index],
            self._parameter_names(second_copies=False),
            self._gather(),
        )

    def _parameter_names(self, *, second_copies: bool = True) -> dict[Tensor, str]:
        """Names on a single device, where tied parameters have their first name."""
        assert self.lightning_module is not None
        found: dict[Tensor, str] = {
            parameter: name for name, parameter in self.lightning_module.named_parameters()
        }
        for parameter, name in self._tied.names.items() if self._tied is not None else ():
            found.pop(parameter, None)
            if second_copies:
                found[parameter] = self._partition.with_prefix(name)
        return found

    def _gather(self) -> TensorGather:
        group = None if self._sharded else self._groups.control
        sources = range(self._partition.layout.num_ranks)
        keeps = self._sharded or self.is_global_zero  # the others send what they have
        return TensorGather(group, sources, copy=self._asynchronous and keeps)

    # --- saving -----------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; called on all ranks together.

        Raises:
            CheckpointError: On all ranks, if this checkpoint, or the one before that was written in
                the background, could not be written on one of them.
        """
        self._finish_writing()
        if self._sharded:  # names with the time in them differ between ranks
            filepath = self.broadcast(filepath)
        if not self._one_stage:
            checkpoint[RECORD] = {**checkpoint.get(RECORD, {}), **self._record(checkpoint)}
        background = self._asynchronous and self._training()
        takes_part = self._sharded or self.is_global_zero
        if background and takes_part:
            checkpoint = self._snapshot(checkpoint)
        if self._sharded:
            content, extra = split(checkpoint)
            if self.global_rank >= max(self._layout_ranks(), 1):
                content = {}  # replicas are equal
            group = self._group_for_writing() if background else self._groups.control
            path = local_path(filepath)
            write = functools.partial(write_sharded, path, content, extra, group)
        else:
            write = functools.partial(
                self.checkpoint_io.save_checkpoint,
                checkpoint,
                filepath,
                storage_options=storage_options,
            )
        if background:
            self._queued_path = filepath
            if takes_part:
                self._queue.submit(write)
            return
        error: Exception | None = None
        if takes_part:
            try:
                write()
            except Exception as problem:
                error = problem
        self._require_written(error, filepath)

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint, once the one that is being written in its place is whole."""
        if not self.is_global_zero:
            return
        if self._queue.busy:
            self._queue.submit(functools.partial(self._remove, filepath))
        else:
            self._remove(filepath)

    def _remove(self, filepath: _PATH) -> None:
        try:
            self.checkpoint_io.remove_checkpoint(filepath)
        except OSError as error:  # no reason to stop training
            rank_zero_warn(f"The checkpoint {filepath} could not be removed: {error}")

    def _record(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What Lightning's checkpoints have no place for."""
        assert self.lightning_module is not None
        record: dict[str, Any] = {"version": 1, "model": model_record(self.lightning_module)}
        if self._one_stage:
            record["state_names"] = list(checkpoint["state_dict"])
        else:
            record["state_names"] = list(self._partition.full_names)
        if "optimizer_states" in checkpoint:
            if not self._one_stage:
                record["optimizer_names"] = [list(each.names) for each in self._optimizer_layouts]
            record["random"] = random_state.gather(self._groups.control)
        return record

    def _snapshot(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A copy that training does not change any more."""
        memo: dict[int, Any] = {}
        if self.is_distributed and not self._one_stage:  # these were copied when collected
            for tensors in (
                checkpoint["state_dict"],
                *(state["state"] for state in checkpoint.get("optimizer_states", ())),
            ):
                memo[id(tensors)] = tensors
        else:
            copy_to_host(checkpoint, memo)
        return copy.deepcopy(checkpoint, memo)

    def _training(self) -> bool:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return bool(trainer.training) and trainer.state.fn == TrainerFn.FITTING

    def _layout_ranks(self) -> int:
        return self.world_size if self._one_stage else self._partition.layout.num_ranks

    def _group_for_writing(self) -> dist.ProcessGroup | None:
        """A group that only the background thread uses; all ranks make it at their first save."""
        if self._write_group is None and self._groups.control is not None:
            self._write_group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._write_group

    def _write_at_once(self) -> None:
        """From now on write in the foreground: the process is about to end."""
        self._asynchronous = False

    def _finish_writing(self) -> None:
        """Wait for what is written in the background; called on all ranks together."""
        if self._queued_path is None:
            return
        path, self._queued_path = self._queued_path, None
        self._require_written(self._queue.wait(), path)

    def _require_written(self, error: Exception | None, path: _PATH) -> None:
        try:
            require_success(error, self._groups.control)
        except CheckpointError as problem:
            self._raise_not_written(path, problem.value, problem)
        except Exception as problem:
            text = f"rank {self.global_rank} failed: {type(problem).__name__}: {problem}"
            self._raise_not_written(path, text, problem)

    def _raise_not_written(self, path: _PATH, text: str, cause: Exception) -> NoReturn:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {text}",
            limit="checkpoints are written whole; a former one stays as it was",
            remedy="make room or choose another folder, then resume from the last checkpoint",
        ) from cause

    # --- loading ----------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of either kind; of shards, only what this rank holds.

        All ranks read what rank 0 names: names with the time in them, as that of the best
        checkpoint, differ between ranks.
        """
        self._finish_writing()
        if not self._one_stage:
            checkpoint_path = self.broadcast(checkpoint_path)
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        folder = existing(Path(checkpoint_path))
        if is_sharded(folder):
            checkpoint = read_sharded(folder, self._reads(fitting))
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if fitting and not self._one_stage:  # which is to behave as Lightning does
            mend_epoch_end(checkpoint)
            states = checkpoint.get(RECORD, {}).get("random")
            self._random_state = random_state.of_rank(states, self.global_rank, self.world_size)
        return checkpoint

    def _reads(self, fitting: bool) -> Callable[[str, str], bool]:
        """Which parts of a sharded checkpoint this rank reads."""
        assert self.lightning_module is not None
        own = set(self.lightning_module.state_dict())
        held = set(self._parameter_names().values())
        foreign = set() if self._one_stage else set(self._partition.full_names) - held

        def wanted(part: str, name: str) -> bool:
            return name in own if part == MODEL else fitting and name not in foreign

        return wanted

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's stages from a full state dict, or from one with its part."""
        assert self.lightning_module is not None
        if self._one_stage:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = checkpoint["state_dict"]
        if strict:
            check_names(getattr(state, "all_names", None) or state, self._partition.full_names)
        own = self.lightning_module.state_dict()
        part = {name: value for name, value in state.items() if name in own}
        self.lightning_module.load_state_dict(part, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of each optimizer's state."""
        if self._one_stage:
            super().load_optimizer_state_dict(checkpoint)
            return
        names = self._parameter_names()
        saved_states = checkpoint["optimizer_states"]
        saved_names = checkpoint.get(RECORD, {}).get("optimizer_names") or [None] * len(
            saved_states
        )
        for optimizer, layout, saved, saved_order in zip(
            self.optimizers, self._optimizer_layouts, saved_states, saved_names, strict=True
        ):
            load_optimizer_state(optimizer, layout, names, saved, saved_order)
        _optimizers_to_device(self.optimizers, self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Put the random number generators where the checkpoint left them.

        At the last moment: iterating over loaders draws random numbers, too.
        """
        if self._random_state is not None:
            random_state.restore(self._random_state)
            self._random_state = None

    # --- the end ----------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Wait for the last checkpoint."""
        super().on_train_end()
        self._take_time_to_save()
        self._finish_writing()

    def _take_time_to_save(self) -> None:
        """Training is over: no request to stop is to end the process while it still writes."""
        if self._stop_request is not None:
            self._stop_request.saving()

    def teardown(self) -> None:
        """Wait for what this rank still writes; after a failure, the ranks cannot agree on it."""
        self._take_time_to_save()
        error = self._queue.close()
        if error is not None:
            rank_zero_warn(f"The checkpoint {self._queued_path} could not be written: {error}")
        self._queued_path = None
        super().teardown()
