"""The LightningModule that ``entrain-train`` trains; plain, and usable as an example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.freezing import freeze as freeze_parts

if TYPE_CHECKING:
    from lightning_entrain.data.batch import PlannedBatch
    from lightning_entrain.models.entrain_model import EntrainModel


class EntrainLightningModule(pl.LightningModule):
    """Trains an :class:`EntrainModel` by next-token prediction.

    It knows nothing of stages or ranks: without ``EntrainStrategy`` it trains the same model on
    one process.

    Logged per training step (global values, equal on all ranks):

    | key | meaning |
    |---|---|
    | train/loss | mean cross entropy over the label tokens of the global batch, in nats |
    | train/token_accuracy | share of label tokens that have the largest logit |
    | train/learning_rate | learning rate of the step |
    | val/loss, test/loss | mean over global batches, weighted by samples |
    | val/token_accuracy, test/token_accuracy | likewise |

    Args:
        model: The model.
        optimizer: ``adamw`` or ``sgd``.
        learning_rate: Peak learning rate.
        weight_decay: Decay of weight matrices; norms and biases have none.
        betas: AdamW's decay rates.
        eps: AdamW's term against division by zero.
        momentum: SGD's momentum.
        schedule: ``cosine`` or ``constant``, after the warm-up.
        warmup_steps: Optimizer steps of linear warm-up.
        min_learning_rate_ratio: The cosine ends at this share of the peak.
        max_steps: Optimizer step at which the cosine ends; the trainer's last step if None. A
            resumed run follows its own value, not the checkpoint's.
        freeze: Parts of the model that are not trained: some of ``encoder``, ``projector``,
            ``llm``.
        lora: Modules that are trained by adapters alone (the extra ``lora``): some of ``encoder``,
            ``llm``.
        lora_rank: Rank of the adapters.
        lora_alpha: Their product is scaled by ``lora_alpha / lora_rank``.
        lora_dropout: Dropout before them.
    """

    def __init__(
        self,
        model: EntrainModel,
        *,
        optimizer: str = "adamw",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.0,
        schedule: str = "cosine",
        warmup_steps: int = 0,
        min_learning_rate_ratio: float = 0.1,
        max_steps: int | None = None,
        freeze: Sequence[str] = (),
        lora: Sequence[str] = (),
        lora_rank: int = 8,
        lora_alpha: float = 16.0,
        lora_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_choice("optimizer", optimizer, ("adamw", "sgd"))
        _check_choice("schedule", schedule, ("cosine", "constant"))
        betas = (float(betas[0]), float(betas[1]))
        freeze, lora = list(freeze), list(lora)
        _check_numbers(locals())
        freeze_parts(model, freeze)
        if lora:
            _add_adapters(model, lora, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout)
        self.save_hyperparameters(ignore=["model"])
        self.model = model

    def forward(self, batch: PlannedBatch) -> Tensor:
        """Mean loss of the global batch."""
        return self.model(batch)

    def training_step(self, batch: PlannedBatch, batch_idx: int) -> Tensor:
        """Loss of one global batch."""
        loss = self._loss("train", batch)
        self.log("train/learning_rate", self._learning_rate(), batch_size=batch.num_samples)
        return loss

    def validation_step(self, batch: PlannedBatch, batch_idx: int) -> Tensor:
        """Loss of one global batch, without training."""
        return self._loss("val", batch)

    def test_step(self, batch: PlannedBatch, batch_idx: int) -> Tensor:
        """Loss of one global batch, without training."""
        return self._loss("test", batch)

    def predict_step(self, batch: PlannedBatch, batch_idx: int) -> dict[str, Tensor]:
        """Numbers of one global batch, equal on all ranks: nothing per token leaves the pipeline.

        Returns:
            ``loss``, the mean over label tokens; ``num_label_tokens``; ``sample_indices``
            ``[samples]``, which samples of the dataset they are of; and the sums of the model's
            ``scalars`` by name.
        """
        return {
            "loss": self(batch),
            "num_label_tokens": torch.tensor(batch.num_label_tokens),
            "sample_indices": torch.tensor(batch.sample_indices),
            **self.model.scalars_out,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what the model is, so that `entrain-export` can build it."""
        from lightning_entrain.checkpoint.model_record import model_record
        from lightning_entrain.checkpoint.sharded import RECORD

        checkpoint.setdefault(RECORD, {})["model"] = model_record(self)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Optimizer, and a schedule that moves with every optimizer step."""
        options = self.hparams
        groups = parameter_groups(self, options["weight_decay"])
        optimizer: torch.optim.Optimizer
        if options["optimizer"] == "adamw":
            optimizer = torch.optim.AdamW(
                groups, lr=options["learning_rate"], betas=options["betas"], eps=options["eps"]
            )
        else:
            optimizer = torch.optim.SGD(
                groups, lr=options["learning_rate"], momentum=options["momentum"]
            )
        scheduler = PresentSchedule(optimizer, self._factor())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }

    def _factor(self) -> LearningRateFactor:
        options = self.hparams
        last_step: float = math.inf
        if options["schedule"] == "cosine":
            last_step = options["max_steps"] or self.trainer.estimated_stepping_batches
            if math.isinf(last_step):
                raise ConfigError(
                    "schedule is 'cosine' in a training without end",
                    limit="a known last step",
                    remedy="set max_steps or max_epochs of the trainer, or schedule='constant'",
                )
        return LearningRateFactor(
            options["warmup_steps"], last_step, options["min_learning_rate_ratio"]
        )

    def _loss(self, phase: str, batch: PlannedBatch) -> Tensor:
        loss = self(batch)
        train = phase == "train"
        options: dict[str, Any] = {
            "batch_size": batch.num_samples,
            "on_step": train,
            "on_epoch": not train,
            "prog_bar": True,
        }
        self.log(f"{phase}/loss", loss.detach(), **options)
        correct = self.model.scalars_out.get("num_correct")
        if correct is not None:
            accuracy = correct.float() / max(batch.num_label_tokens, 1)
            self.log(f"{phase}/token_accuracy", accuracy, **options)
        return loss

    def _learning_rate(self) -> float:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list), "configure_optimizers returns one optimizer"
        return float(optimizer.param_groups[0]["lr"])


class LearningRateFactor:
    """Linear warm-up, then a cosine from 1 to ``min_ratio``; a callable of the step.

    Args:
        warmup_steps: Steps of warm-up; step ``n`` of them has the factor
            ``(n + 1) / warmup_steps``.
        last_step: Step at which the cosine ends; infinite for a constant factor.
        min_ratio: Factor at and after the last step.
    """

    def __init__(self, warmup_steps: int, last_step: float, min_ratio: float) -> None:
        self.warmup_steps = warmup_steps
        self.last_step = last_step
        self.min_ratio = min_ratio

    def __call__(self, step: int) -> float:
        """Factor of the peak learning rate at optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if math.isinf(self.last_step):
            return 1.0
        span = max(self.last_step - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class PresentSchedule(LambdaLR):
    """A `LambdaLR` that keeps its own peak and factor when a checkpoint is loaded.

    Of the checkpoint it takes the step. LambdaLR would go on with the saved factor, so that a run
    resumed to train longer would stay at the end of the cosine of the first. With unchanged
    options the learning rates are exactly those of an uninterrupted run.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step, and set the learning rate that this schedule has there."""
        own_peaks = self.base_lrs
        super().load_state_dict({**state_dict, "lr_lambdas": [None] * len(self.lr_lambdas)})
        self.base_lrs = own_peaks
        groups = self.optimizer.param_groups
        for group, peak, factor in zip(groups, own_peaks, self.lr_lambdas, strict=True):
            group["initial_lr"] = peak
            group["lr"] = peak * factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in groups]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices with weight decay; norms, biases and other vectors without.

    Frozen parameters are left out. Both groups are always present, so that groups have the same
    number on every rank.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def _add_adapters(model: EntrainModel, parts: Sequence[str], **options: Any) -> None:
    from lightning_entrain.models.lora import PARTS, LoraOptions, add_lora

    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"lora has {part!r}", limit=f"some of {', '.join(PARTS)}")
    made = {part: LoraOptions(**options) for part in parts}
    add_lora(model, encoder=made.get("encoder"), llm=made.get("llm"))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}", limit=" or ".join(choices))


def _check_numbers(values: dict[str, Any]) -> None:
    for name in ("weight_decay", "warmup_steps", "momentum"):
        if values[name] < 0:
            raise ConfigError(f"{name} is {values[name]}", limit="at least 0")
    if values["learning_rate"] <= 0:
        raise ConfigError(f"learning_rate is {values['learning_rate']}", limit="above 0")
    if values["max_steps"] is not None and values["max_steps"] < 1:
        raise ConfigError(f"max_steps is {values['max_steps']}", limit="at least 1, or None")
    if not 0 <= values["min_learning_rate_ratio"] <= 1:
        raise ConfigError(
            f"min_learning_rate_ratio is {values['min_learning_rate_ratio']}", limit="0 to 1"
        )
    if not all(0 <= beta < 1 for beta in values["betas"]):
        raise ConfigError(f"betas is {values['betas']}", limit="two numbers in [0, 1)")
