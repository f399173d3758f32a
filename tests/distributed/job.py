"""A small training job that runs on one process or on many."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_entrain.assign import assign_samples
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.collate import build_batch
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.models.entrain_model import EntrainModel, num_correct
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.strategy import EntrainStrategy


class Batches(Dataset):
    """Global batches in order, planned for a number of replicas."""

    def __init__(self, job: Job, replicas: int, needs: DataNeeds) -> None:
        self.job, self.replicas, self.needs = job, replicas, needs
        self.source = synthetic_dataset(
            job.num_batches * job.batch_size,
            seed=job.seed,
            text_only_fraction=job.text_only,
            min_side=job.min_side,
            max_side=job.max_side,
        )

    def __len__(self) -> int:
        return self.job.num_batches

    def __getitem__(self, index: int) -> PlannedBatch:
        size = self.job.batch_size
        index = (index + self.job.skip_batches) % self.job.num_batches
        indices = range(index * size, (index + 1) * size)
        sizes = [self.source.sizes[i] for i in indices]
        assignment = assign_samples(
            [s.num_patches for s in sizes],
            [s.num_tokens for s in sizes],
            num_replicas=self.replicas,
            num_microbatches=self.job.num_microbatches,
            policy=self.job.policy,
            limit_by_heaviest=False,
            equal_counts=False,
        )
        return build_batch(self.source, indices, assignment, sizes, self.needs)


class Module(pl.LightningModule):
    def __init__(self, model: EntrainModel, job: Job) -> None:
        super().__init__()
        self.model = model
        self.job = job
        self.losses: list[float] = []
        self.correct: list[float] = []
        self.val_losses: list[float] = []
        self.first_gradients: dict[str, torch.Tensor] = {}

    def training_step(self, batch: PlannedBatch, batch_idx: int) -> torch.Tensor:
        loss = self.model(batch)
        self.log("train/loss", loss)
        self.losses.append(loss.item())
        self.correct.append(self.model.scalars_out["num_correct"].item())
        return loss * self.job.loss_scale

    def validation_step(self, batch: PlannedBatch, batch_idx: int) -> None:
        loss = self.model(batch)
        self.log("val/loss", loss)
        self.val_losses.append(loss.item())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.first_gradients:
            self.first_gradients = {
                name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None
            }

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        if self.job.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@dataclass
class Job:
    num_batches: int = 12
    batch_size: int = 6
    num_microbatches: int = 3
    seed: int = 0
    text_only: float = 0.25
    min_side: int = 20
    max_side: int = 120
    optimizer: str = "adamw"
    loss_scale: float = 1.0
    encoder_layers: int = 3
    llm_layers: int = 3
    trainer: dict[str, Any] = field(default_factory=dict)
    validate: bool = False
    ckpt_path: str | None = None
    skip_batches: int = 0
    policy: str = "fixed"
    model: dict[str, Any] = field(default_factory=dict)

    def module(self) -> Module:
        model = nano_vlm(
            encoder_layers=self.encoder_layers, llm_layers=self.llm_layers, **self.model
        )
        model.scalars["num_correct"] = num_correct
        return Module(model, self)

    def make_trainer(
        self, strategy: EntrainStrategy | None, devices: int, root: Path
    ) -> pl.Trainer:
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": devices,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "default_root_dir": str(root),
            **self.trainer,
        }
        if strategy is not None:
            options["strategy"] = strategy
        return pl.Trainer(**options)

    def loader(self, trainer: pl.Trainer, module: Module) -> DataLoader:
        strategy = trainer.strategy
        needs = DataNeeds.everything()
        replicas = 1
        if isinstance(strategy, EntrainStrategy):
            strategy.connect(module)
            needs, replicas = strategy.data_needs, strategy.num_replicas
        return DataLoader(Batches(self, replicas, needs), batch_size=None)

    def fit(self, strategy: EntrainStrategy | None, devices: int, root: Path) -> Outcome:
        module = self.module()
        trainer = self.make_trainer(strategy, devices, root)
        loader = self.loader(trainer, module)
        val = loader if self.validate else None
        trainer.fit(module, loader, val, ckpt_path=self.ckpt_path)
        return Outcome(
            losses=module.losses,
            correct=module.correct,
            val_losses=module.val_losses,
            first_gradients=module.first_gradients,
            parameters={n: p.detach().clone() for n, p in module.named_parameters()},
            metrics={k: float(v) for k, v in trainer.callback_metrics.items()},
        )


@dataclass
class Outcome:
    losses: list[float]
    correct: list[float]
    val_losses: list[float]
    first_gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    metrics: dict[str, float]

    def to_numpy(self) -> Outcome:
        """Tensors as arrays: a pipe hands tensors over by file descriptors that die with a rank."""
        for part in (self.first_gradients, self.parameters):
            for name, tensor in part.items():
                part[name] = tensor.float().numpy().copy()  # type: ignore[assignment]
        return self


def fit_on_rank(job: Job, options: dict[str, Any], devices: int, root: Path) -> Outcome:
    return job.fit(EntrainStrategy(**options), devices, root).to_numpy()
