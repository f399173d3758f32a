"""The LightningModule trains on one process without the strategy."""

from __future__ import annotations

import csv
import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.module import EntrainLightningModule, LearningRateFactor, parameter_groups

from .helpers import make_batch

GROUPING = ([[0, 1, 2], [4, 5, 6]], [[0, 2, 3], [1, 4, 5, 6, 7]])


def fit(module, tmp_path, max_steps=12, **options):
    batch = make_batch(GROUPING)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        **options,
    )
    loader = DataLoader([batch] * 6, batch_size=None)
    trainer.fit(module, loader, DataLoader([batch] * 2, batch_size=None))
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return trainer, rows


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_loss_falls_and_is_logged(tmp_path, optimizer):
    rate = {"adamw": 3e-3, "sgd": 0.3}[optimizer]
    module = EntrainLightningModule(
        nano_vlm(), optimizer=optimizer, learning_rate=rate, warmup_steps=2
    )
    trainer, rows = fit(module, tmp_path)
    train = [row for row in rows if row["train/loss"]]
    losses = [float(row["train/loss"]) for row in train]
    assert [int(row["step"]) for row in train] == list(range(12))
    assert losses[-1] < losses[0] - 0.1
    rates = [float(row["train/learning_rate"]) for row in train]
    assert rates[:3] == pytest.approx([rate / 2, rate, rate])
    assert rates[-1] < 0.2 * rate
    batch = make_batch(GROUPING)
    module.eval()
    with torch.no_grad():
        expected = module(batch).item()
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)
    accuracy = module.model.scalars_out["num_correct"] / batch.num_label_tokens
    assert float(trainer.callback_metrics["val/token_accuracy"]) == pytest.approx(accuracy.item())
    assert 0 < accuracy < 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_checkpoint_loads_and_resumes(tmp_path):
    whole, _ = fit(EntrainLightningModule(nano_vlm(), learning_rate=3e-3), tmp_path / "a")
    options = {"learning_rate": 3e-3, "max_steps": 12}
    first, _ = fit(EntrainLightningModule(nano_vlm(), **options), tmp_path / "b", max_steps=6)
    path = tmp_path / "six.ckpt"
    first.save_checkpoint(path)
    loaded = EntrainLightningModule.load_from_checkpoint(path, model=nano_vlm(seed=1))
    assert loaded.hparams.learning_rate == 3e-3
    module = EntrainLightningModule(nano_vlm(seed=1), **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = DataLoader([make_batch(GROUPING)] * 6, batch_size=None)
    trainer.fit(module, loader, ckpt_path=path)
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, atol=1e-7), name


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(tmp_path, precision):
    module = EntrainLightningModule(nano_vlm(), learning_rate=3e-3)
    _, rows = fit(module, tmp_path, precision=precision)
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    exact = nano_vlm()(make_batch(GROUPING)).item()
    assert losses[0] == pytest.approx(exact, rel=0.01)
    assert losses[0] != exact
    assert losses[-1] < losses[0] - 0.1


def test_no_decay_on_norms_and_biases():
    model = nano_vlm()
    model.llm.model.embed_tokens.requires_grad_(False)
    decayed, free = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert all(
        "norm" in names[id(p)] or "bias" in names[id(p)] or "ln_q" in names[id(p)]
        for p in free["params"]
    )
    assert all("norm" not in names[id(p)] for p in decayed["params"])
    total = len(decayed["params"]) + len(free["params"])
    assert total == len(list(model.parameters())) - 1


def test_learning_rate_factor():
    factor = LearningRateFactor(4, 14, 0.1)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factor(9) == pytest.approx(0.55)
    assert factor(14) == factor(100) == pytest.approx(0.1)
    assert LearningRateFactor(0, float("inf"), 0.1)(1000) == 1.0
    assert LearningRateFactor(5, 3, 0.1)(5) == 1.0


def test_arguments_are_plain_types():
    allowed = {"str", "float", "int", "int | None", "tuple[float, float]", "Sequence[str]"}
    parameters = list(inspect.signature(EntrainLightningModule).parameters.values())
    assert parameters[0].name == "model"
    assert {p.annotation for p in parameters[1:]} <= allowed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"schedule": "linear"}, "schedule is 'linear'"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"min_learning_rate_ratio": 2.0}, "min_learning_rate_ratio is 2.0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"freeze": ["vision"]}, "freeze has .vision."),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        EntrainLightningModule(nano_vlm(), **options)


def test_cosine_without_an_end(tmp_path):
    module = EntrainLightningModule(nano_vlm())
    with pytest.raises(ConfigError, match="without end"):
        fit(module, tmp_path, max_steps=-1, max_epochs=-1, enable_checkpointing=False)
