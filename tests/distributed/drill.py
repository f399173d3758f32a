"""A job that fails on request, for drills under the real launchers.

`python -m tests.distributed.drill MODE RANK FOLDER`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Batches, Job, Module

STEP = 2


class Drill(Module):
    """Fails in the given place on the given rank."""

    mode = ""
    rank = 0

    def fail(self, mode: str) -> None:
        if mode != self.mode or self.global_rank != self.rank:
            return
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang":
            time.sleep(1000)
        raise ValueError(f"planted in {mode} on rank {self.rank}")

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_optimizers(self) -> Any:
        self.fail("optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0:
            print("step", self.global_step, flush=True)
        if batch_idx == STEP:
            for mode in ("raise", "kill", "hang"):
                self.fail(mode)
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                self.fail("once")
        if self.mode == "endless":
            time.sleep(0.2)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation")
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail("checkpoint")


class FailingBatches(Batches):
    """Batches of which one cannot be loaded."""

    fails = False

    def __getitem__(self, index: int) -> Any:
        if self.fails and index == STEP:
            raise OSError(f"planted in the loader on rank {os.environ.get('LOCAL_RANK', '0')}")
        return super().__getitem__(index)


def main(mode: str, rank: int, root: Path, devices: int = 2) -> None:
    """Train; the folder receives a file with this process's id."""
    (root / f"pid{os.environ.get('LOCAL_RANK', '0')}").write_text(str(os.getpid()))
    job = Job(num_batches=6, trainer={"max_epochs": 1000 if mode == "endless" else 1})
    if mode == "disagree" and os.environ.get("LOCAL_RANK", "0") == str(rank):
        job.seed = 1
    module = Drill(job.module().model, job)
    module.mode, module.rank = mode, rank
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=EntrainStrategy(timeout_seconds=4 if mode == "hang" else 60),
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=root,
        num_sanity_val_steps=0,
        **job.trainer,
    )
    trainer.strategy.connect(module)
    batches = FailingBatches(job, 1, trainer.strategy.data_needs)
    batches.fails = mode == "loader" and os.environ.get("LOCAL_RANK", "0") == str(rank)
    loader = DataLoader(batches, batch_size=None, num_workers=1 if mode == "loader" else 0)
    trainer.fit(module, loader, loader, ckpt_path="last")
    if trainer.global_rank == 0:
        print("finished after", trainer.global_step, "steps", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
