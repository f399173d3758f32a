"""Runs with the data module, for tests of checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_entrain import EntrainDataModule
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.module import EntrainLightningModule
from lightning_entrain.strategy import EntrainStrategy

BATCHES_PER_EPOCH = 5

BeforeStep = Callable[[pl.LightningModule, int, int], None]
"""Called with the module, the rank and the index of the batch."""


class NoisyModule(EntrainLightningModule):
    """Its loss depends on every random number generator."""

    noisy = True
    uneven = False
    """Whether ranks draw different numbers."""
    before_step: BeforeStep | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.before_step is not None:
            self.before_step(self, self.global_rank, batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.noisy:
            for _ in range(1 + self.uneven * self.global_rank):
                noise = random.random() + np.random.rand() + torch.rand(())
            loss = loss * (1 + 0.1 * noise)
        self.losses.append(loss.item())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["losses"] = self.losses  # grows while it is written


@dataclass
class Run:
    """One fit of ``num_steps`` steps."""

    root: Path
    devices: int = 1
    strategy: dict[str, Any] | None = None
    num_steps: int = 9
    num_workers: int = 0
    save_every: int | None = None
    save_top_k: int = -1
    ckpt_path: str | None = None
    noisy: bool = True
    uneven: bool = False
    assignment: str = "entrain"
    before_step: BeforeStep | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def module(self) -> NoisyModule:
        module = NoisyModule(nano_vlm(), learning_rate=3e-3, warmup_steps=2, max_steps=9)
        module.noisy, module.uneven = self.noisy, self.uneven
        module.losses = []
        module.before_step = self.before_step
        return module

    def data(self) -> EntrainDataModule:
        return EntrainDataModule(
            SyntheticSource(28, max_side=90),
            global_batch_size=4,
            num_microbatches=2,
            assignment=self.assignment,
            tokenizer=ByteTokenizer(),
            num_workers=self.num_workers,
            val_fraction=0.15,
            test_fraction=0.1,
            cache_dir=str(self.root / "cache"),
            progress=False,
        )

    def make_trainer(self) -> pl.Trainer:
        callbacks = []
        if self.save_every is not None:
            callbacks.append(
                ModelCheckpoint(
                    dirpath=self.root,
                    filename="{step}",
                    every_n_train_steps=self.save_every,
                    save_top_k=self.save_top_k,
                )
            )
        strategy = "auto" if self.strategy is None else EntrainStrategy(**self.strategy)
        return pl.Trainer(
            **{
                "accelerator": "cpu",
                "devices": self.devices,
                "strategy": strategy,
                "max_steps": self.num_steps,
                "logger": False,
                "callbacks": callbacks,
                "enable_checkpointing": self.save_every is not None,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "limit_val_batches": 1,
                "num_sanity_val_steps": 0,
                "default_root_dir": str(self.root),
                **self.trainer,
            }
        )

    def fit(self) -> tuple[list[float], dict[str, np.ndarray]]:
        """Losses of all steps, and the parameters at the end."""
        pl.seed_everything(1, verbose=False)
        module = self.module()
        self.make_trainer().fit(module, datamodule=self.data(), ckpt_path=self.ckpt_path)
        parameters = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
        return module.losses, parameters


def fit(run: Run) -> tuple[list[float], dict[str, np.ndarray]]:
    return run.fit()
