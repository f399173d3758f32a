"""On one process the strategy runs any LightningModule, exactly as Lightning's own does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_entrain.errors import ConfigError
from lightning_entrain.strategy import EntrainStrategy


class Ordinary(pl.LightningModule):
    """A small classifier that knows nothing of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.body(inputs)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"},
        }


class ClosureSteps(Ordinary):
    """An optimizer that calls the training step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Manual(Ordinary):
    """Two optimizers that take turns, one of them over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.toggle_optimizer(optimizer)
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if batch_idx % 2 == 0 or batch_idx % 4 == 3:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD([*self.body.parameters(), *self.norm.parameters()], lr=0.1)
        return body, torch.optim.Adam(self.head.parameters(), lr=0.05)


class BuiltLate(Ordinary):
    def configure_model(self) -> None:
        if isinstance(self.head, nn.Linear):
            torch.manual_seed(5)
            self.head = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))  # type: ignore[assignment]


def record_hooks(module: pl.LightningModule) -> list[str]:
    """Names of all hooks that Lightning calls on the module, in order."""
    calls: list[str] = []
    for name in dir(pl.core.hooks.ModelHooks) + dir(pl.core.hooks.CheckpointHooks):
        if name.startswith("on_") or name in ("setup", "teardown", "configure_gradient_clipping"):
            setattr(module, name, noting(calls, name, getattr(module, name)))
    return calls


def noting(calls: list[str], name: str, hook: Callable) -> Callable:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return hook(*args, **kwargs)

    return noted


def same(found: Any, expected: Any) -> bool:
    """Equality to the last bit, tensors included."""
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def loaders() -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(44, 6, generator=generator)
    labels = torch.randint(3, (44,), generator=generator)
    data = TensorDataset(inputs, labels)
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=16)


def outcome(
    module_class: type[Ordinary], strategy: Any, root: Path, options: dict[str, Any]
) -> dict[str, Any]:
    pl.seed_everything(11, verbose=False)
    module = module_class()
    calls = record_hooks(module)
    monitor = LearningRateMonitor()
    saver = ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val/loss", patience=1, min_delta=0.2)
    callbacks = [stopping, monitor, saver]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=4,
        callbacks=callbacks,
        default_root_dir=root,
        logger=CSVLogger(root),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    train, val = loaders()
    trainer.fit(module, train, val)
    tested = trainer.test(module, val, ckpt_path="best", verbose=False)
    predicted = torch.cat(trainer.predict(module, val))  # type: ignore[arg-type]
    trainer.fit_loop.max_epochs = 6
    trainer.should_stop = False
    stopping.wait_count = 0
    trainer.fit(module, train, val, ckpt_path=saver.last_model_path)
    last = torch.load(saver.last_model_path, weights_only=False)
    for dirty in ("callbacks", "loops"):  # paths and wall times
        last.pop(dirty)
    return {
        "losses": module.losses,
        "hooks": calls,
        "tested": tested,
        "predicted": predicted,
        "scores": sorted(float(score) for score in saver.best_k_models.values()),
        "rates": monitor.lrs,
        "metrics": trainer.callback_metrics,
        "steps": (trainer.global_step, trainer.current_epoch),
        "checkpoint": last,
        "parameters": dict(module.named_parameters()),
        "device": module.device,
        "distributed": trainer._accelerator_connector.is_distributed,
    }


@pytest.mark.parametrize(
    ("module_class", "options"),
    [
        pytest.param(
            Ordinary,
            {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, "val_check_interval": 5},
            id="accumulation and clipping",
        ),
        pytest.param(
            Ordinary,
            {
                "gradient_clip_val": 0.01,
                "gradient_clip_algorithm": "value",
                "precision": "bf16-mixed",
                "overfit_batches": 3,
            },
            id="clipping by value, bf16-mixed",
        ),
        pytest.param(Ordinary, {"precision": "64-true", "limit_train_batches": 0.5}, id="64-true"),
        pytest.param(ClosureSteps, {"limit_train_batches": 4}, id="closures"),
        pytest.param(Manual, {}, id="manual optimization"),
        pytest.param(BuiltLate, {}, id="configure_model"),
    ],
)
def test_as_on_a_single_device(
    module_class: type[Ordinary], options: dict[str, Any], tmp_path: Path
) -> None:
    expected = outcome(module_class, "auto", tmp_path / "lightning", options)
    found = outcome(module_class, EntrainStrategy(), tmp_path / "entrain", options)
    assert len(expected["losses"]) > 4
    for name, value in expected.items():
        assert same(found[name], value), f"{name}: {found[name]} instead of {value}"


def test_fp16_needs_no_common_scale_on_one_process(tmp_path: Path) -> None:
    module = Ordinary()
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=EntrainStrategy(),
        precision="16-true",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        fast_dev_run=True,
    )
    made.fit(module, *loaders())
    assert module.dtype == torch.float16


def test_stages_need_a_model_to_cut(tmp_path: Path) -> None:
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=EntrainStrategy(encoder_stages=1, llm_stages=2),
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigError, match=r"Ordinary holds 0 EntrainModels.*devices=1"):
        made.fit(Ordinary(), loaders()[0])


def test_an_interactive_session_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_entrain.runtime.launcher._IS_INTERACTIVE", True)
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True
    )
    options: dict[str, Any] = {"accelerator": "cpu", "default_root_dir": tmp_path}
    with pytest.raises(ConfigError, match=r"2 processes from an interactive.*python file\.py"):
        pl.Trainer(devices=2, strategy=EntrainStrategy(), **options)
    pl.Trainer(devices=1, strategy=EntrainStrategy(), **options)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    pl.Trainer(devices=2, strategy=EntrainStrategy(), **options)
