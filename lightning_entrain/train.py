"""The app `entrain-train`: one training run, described by Hydra configs."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_entrain.command_line import run_hydra, wants_traceback
from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import num_devices, register_configs, validate
from lightning_entrain.config_reference import known_names
from lightning_entrain.errors import ConfigError, DataError, EntrainError, RankFailedError
from lightning_entrain.job_ranks import is_first_on_node, is_launching, rank_in_job
from lightning_entrain.run_folder import run_folder

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_entrain.callbacks.summary import RunSummary


def main() -> None:
    """Entry point of `entrain-train`."""
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


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run leaves behind.

    Attributes:
        run_dir: Folder of the run.
        summary: Counts, losses and rates.
        trainer: The trainer, after its fit.
        wandb_dir: Folder of the W&B run, if there is one.
        wandb_url: Address of the W&B run, if it was uploaded.
        num_devices: Processes of the run, on all machines.
    """

    run_dir: Path
    summary: RunSummary
    trainer: pl.Trainer
    wandb_dir: Path | None
    wandb_url: str | None
    num_devices: int


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
    """
    validate(config)
    devices = num_devices(config)
    ckpt_path = _checkpoint_path(config)
    with run_folder(config.run_dir):
        return _train(config, devices, ckpt_path)


def _train(config: DictConfig, devices: int, ckpt_path: str | None) -> RunResult | None:
    import lightning.pytorch as pl
    from hydra.utils import instantiate

    from lightning_entrain.callbacks.summary import RunSummary
    from lightning_entrain.runtime.multirun import end_job, in_sweep

    _quieten()
    _limit_threads(devices)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    datamodule = instantiate(config.data)
    _prepare(datamodule, config.prepare_timeout_seconds)
    module = build_module(config, datamodule)
    summary = RunSummary()
    trainer = build_trainer(config, devices, extra_callbacks=[summary])
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    except BaseException:
        _end_failed_job(trainer)
        raise
    wandb_dir, wandb_url = _finish_wandb()
    if in_sweep():
        end_job(trainer)
    if trainer.global_rank != 0:
        return None
    return RunResult(
        run_dir=Path(config.run_dir),
        summary=summary,
        trainer=trainer,
        wandb_dir=wandb_dir,
        wandb_url=wandb_url,
        num_devices=trainer.world_size,
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


def _end_failed_job(trainer: pl.Trainer) -> None:
    """Close what a failed fit left open, so that this process can end at once.

    The strategy has told the other ranks. Its watch would end this process, too, and print the
    error a second time.
    """
    watch = getattr(trainer.strategy, "_watch", None)
    if watch is not None:
        watch.stop()
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=1)


def _finish_wandb() -> tuple[Path | None, str | None]:
    """Close the W&B run of this process, and tell where it lies."""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if wandb is None or run is None:
        return None, None
    disabled = getattr(run, "disabled", False)
    folder, url = Path(run.dir).parent, None if run.offline else run.url
    wandb.finish()
    return (None, None) if disabled else (folder, url)


if __name__ == "__main__":
    main()
