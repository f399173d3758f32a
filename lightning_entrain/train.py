"""The app `entrain-train`: one training run, described by Hydra configs."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_entrain.command_line import run_hydra, wants_traceback
from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import num_devices, register_configs, validate
from lightning_entrain.config_reference import known_names
from lightning_entrain.errors import ConfigError, DataError, EntrainError, RankFailedError
from lightning_entrain.job_ranks import is_first_on_node, is_launching, rank_in_job
from lightning_entrain.run_end import (
    INTERRUPTED,
    RunResult,
    RunStopped,
    end_failed_job,
    end_run,
    stop_code,
)
from lightning_entrain.run_folder import run_folder

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_entrain.callbacks.summary import RunSummary
    from lightning_entrain.resuming import ResumePoint


def main() -> None:
    """Entry point of `entrain-train`."""
    try:
        _main()
    except KeyboardInterrupt:  # before or after training; Lightning ends a training itself
        if is_first_on_node():
            print("Interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


def _main() -> None:
    # Before torch is imported. Threads that spin while they wait starve the other ranks: on two
    # busy cores a run took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    register_configs()
    run_hydra(
        _job,
        folder=conf_dir(),
        name="train",
        program="entrain-train",
        options=known_names(),
        reference="docs/configuration.md",
    )


def _job(config: DictConfig) -> None:
    """One Hydra job: train, and end with one clear message where that fails."""
    try:
        result = train(config)
    except RunStopped as stopped:
        from lightning_entrain.run_report import print_report

        if stopped.result is not None and stopped.result.summary.num_steps:
            print_report(stopped.result)
        raise
    except Exception as error:
        known = user_error(error)
        if known is None or wants_traceback(config):
            raise
        if _speaks(known):
            print(f"Error: {known}", file=sys.stderr, flush=True)
        sys.exit(1)
    if result is not None:
        from lightning_entrain.run_report import print_report

        print_report(result)


def train(config: DictConfig) -> RunResult | None:
    """Run one training job.

    Called in every process of the job. What can fail on its own, the data above all, is done in
    the launching process before it starts others.

    Args:
        config: A composed `TrainConf`.

    Returns:
        The result on rank 0; None on other ranks.

    Raises:
        EntrainError: For anything the user can mend.
        RunStopped: If Ctrl-C or a signal ended the training.
    """
    validate(config)
    devices = num_devices(config)
    ckpt_path = _checkpoint_path(config)
    with run_folder(config.run_dir):
        return _train(config, devices, ckpt_path)


def _resume_point(config: DictConfig, ckpt_path: str | None) -> ResumePoint | None:
    """Where the run resumes, read in the process that writes its files; None elsewhere."""
    if ckpt_path is None or not is_launching():
        return None
    from lightning_entrain.resuming import ResumePoint

    point = ResumePoint.read(ckpt_path)
    if point is not None:
        point.check_limits(max_steps=config.trainer.max_steps, max_epochs=config.trainer.max_epochs)
    return point


def _train(config: DictConfig, devices: int, ckpt_path: str | None) -> RunResult | None:
    import lightning.pytorch as pl
    from hydra.utils import instantiate

    from lightning_entrain.callbacks.summary import RunSummary
    from lightning_entrain.resuming import NoteResumed, continue_history, remove_passed_checkpoint
    from lightning_entrain.run_report import last_checkpoint
    from lightning_entrain.tokenizer_files import TOKENIZER_FOLDER, save_tokenizer

    _quieten()
    _limit_threads(devices)
    point = _resume_point(config, ckpt_path)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = instantiate(config.data)
    _prepare(datamodule, config.prepare_timeout_seconds)
    module = build_module(config, datamodule)
    if is_launching():
        save_tokenizer(datamodule.tokenizer, Path(config.run_dir) / TOKENIZER_FOLDER)
    summary = RunSummary()
    extra = [summary] if point is None else [summary, NoteResumed(point)]
    trainer = build_trainer(config, devices, extra_callbacks=extra)
    if point is not None:
        continue_history(
            config.run_dir,
            point,
            loggers=trainer.loggers,
            callbacks=getattr(trainer, "callbacks", ()),
        )
    started, code = time.time(), None
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    except BaseException as error:
        code = stop_code(error)
        if code is None:
            end_failed_job(trainer)
            raise
    result = end_run(trainer, summary, config.run_dir, started=started, code=code)
    if code is not None:
        raise RunStopped(code, result)
    if ckpt_path is not None and result is not None:
        _check_trained(summary, ckpt_path)
        remove_passed_checkpoint(trainer, last_checkpoint(result))
    return result


def _check_trained(summary: RunSummary, ckpt_path: str) -> None:
    """Refuse to call it a run where the checkpoint was at the end already, and did not tell."""
    if not summary.num_steps:
        raise ConfigError(
            f"Nothing was left to train after ckpt_path={ckpt_path}",
            limit="trainer.max_steps and trainer.max_epochs above what it has behind it",
            remedy="raise them",
        )


def _prepare(datamodule: Any, timeout_seconds: float) -> None:
    """Prepare the data in the job's first process and the first of each machine; others wait."""
    from lightning_entrain.data.waiting import FailureNote, wait_until_prepared

    is_prepared = getattr(datamodule, "is_prepared", None)
    note = FailureNote.of_job(getattr(datamodule, "cache_dir", None))
    if is_launching():
        with note.left_behind():
            datamodule.prepare_data()
            datamodule.setup("fit")
    elif is_first_on_node() and getattr(datamodule, "prepare_data_per_node", True):
        if is_prepared is None or not is_prepared():  # the machines may share their caches
            datamodule.prepare_data()
    elif is_prepared is not None:
        wait_until_prepared(
            is_prepared, rank=rank_in_job(), timeout_seconds=timeout_seconds, failure=note.read
        )


def build_module(config: DictConfig, datamodule: Any) -> pl.LightningModule:
    """The LightningModule around the configured model, its vocabulary that of the data."""
    from hydra.utils import instantiate

    tokenizer = datamodule.tokenizer
    model = instantiate(
        config.model,
        vocab_size=tokenizer.vocab_size,
        image_token_id=tokenizer.image_token_id,
    )
    _check_image_rule(model, datamodule)
    return instantiate(config.module, model=model)


def _check_image_rule(model: Any, datamodule: Any) -> None:
    """Refuse patches that the encoder does not take, before anything runs."""
    encoder = getattr(model.encoder, "config", None)
    rule = getattr(datamodule, "image_rule", None)
    for option, field in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        takes, made = getattr(encoder, field, None), getattr(rule, option, None)
        if takes is not None and made is not None and takes != made:
            raise ConfigError(
                f"data.{option} is {made}",
                limit=f"{takes}, which the model's encoder takes",
                remedy=f"set data.{option}={takes}",
            )


def build_trainer(
    config: DictConfig, devices: int, *, extra_callbacks: list[Any] | None = None
) -> pl.Trainer:
    """The configured Trainer, with its strategy, loggers and callbacks."""
    import lightning.pytorch as pl
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import ProgressBar

    from lightning_entrain.callbacks.progress import progress_callback
    from lightning_entrain.checkpoint.files import EntrainCheckpointIO

    node: dict[str, Any] = {
        str(name): OmegaConf.to_container(value, resolve=True) if name == "extra" else value
        for name, value in config.trainer.items()
    }
    extra = node.pop("extra")
    callbacks = [*_instantiate_all(config.callbacks), *(extra_callbacks or [])]
    if node["enable_progress_bar"]:
        progress = progress_callback()
        callbacks.append(progress)
        node["enable_progress_bar"] = isinstance(progress, ProgressBar)
    strategy = instantiate(config.strategy)
    options: dict[str, Any] = {
        **node,
        "devices": devices,
        "strategy": strategy,
        "logger": _instantiate_all(config.logger) or False,
        "callbacks": callbacks,
        "default_root_dir": str(config.run_dir),
        "enable_checkpointing": bool(config.callbacks.get("checkpoint")),
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None if node["val_check_interval"] else 1,
        "plugins": [EntrainCheckpointIO()] if strategy == "auto" else None,
        **extra,
    }
    return pl.Trainer(**options)


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def user_error(error: BaseException) -> Exception | None:
    """The error that is meant for the user, if there is one behind this exception."""
    kinds: tuple[type[Exception], ...] = (EntrainError,)
    if "lightning.fabric" in sys.modules:
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        kinds = (EntrainError, MisconfigurationException)
    from lightning_entrain.data.sampler import worker_error

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return seen
        if isinstance(seen, OSError) and seen.errno in _DISK_ERRORS:
            return DataError(
                f"{seen.filename or 'A file'} cannot be written: {seen.strerror}",
                limit="room on the disk, and the right to write there",
                remedy="free space, or write elsewhere with hydra.run.dir=DIR",
            )
        if (ended := worker_error(seen)) is not None:
            return ended
        seen = seen.__cause__  # Hydra wraps what a target raises
    return None


def _speaks(error: Exception) -> bool:
    """Whether this process tells of the error: one process does, with the first error."""
    import torch.distributed as dist

    if is_first_on_node():
        return True
    # Once the ranks are connected, rank 0 hears of an error elsewhere and reports it.
    return not isinstance(error, RankFailedError) and not dist.is_initialized()


def _instantiate_all(group: DictConfig) -> list[Any]:
    from hydra.utils import instantiate

    nodes: Iterator[Any] = (node for node in group.values() if node is not None)
    return [instantiate(node) for node in nodes]


def _checkpoint_path(config: DictConfig) -> str | None:
    if config.ckpt_path is None:
        return None
    path = Path(config.ckpt_path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"ckpt_path is {config.ckpt_path!r}",
            limit="an existing checkpoint",
            remedy="pass the path that the earlier run printed",
        )
    return str(path)


def _limit_threads(num_processes: int) -> None:
    """Share the machine's cores among the processes, unless OMP_NUM_THREADS says otherwise."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // num_processes, 1))


_NOISE = (
    "💡 Tip",
    "GPU available",
    "TPU available",
    "`Trainer(limit_val_batches",
    "Initializing distributed",
    "-----",
)


def _quieten() -> None:
    """Drop what Lightning says at every start, whatever the run is, and what does not apply."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", message=r".*does not have many workers")
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists")
    # Logged values are global already.
    warnings.filterwarnings("ignore", message=r".*sync_dist=True")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logger = logging.getLogger(name)
        if not logger.filters:
            logger.addFilter(lambda record: not record.getMessage().startswith(_NOISE))


if __name__ == "__main__":
    main()
