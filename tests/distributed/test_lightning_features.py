"""What Lightning users rely on works in the pipeline, with the results of one process."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import run_ranks

LAYOUTS = [
    pytest.param(3, {"llm_stages": 2}, id="1+2"),
    pytest.param(4, {"replicas": 2}, id="2x(1+1)"),
]


class Scheduled(Module):
    """A scheduler that follows a validation metric; epoch means; two learning rates."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        encoder = list(self.model.encoder.parameters())
        others = [p for p in self.parameters() if all(p is not q for q in encoder)]
        optimizer = torch.optim.AdamW([{"params": encoder, "lr": 4e-3}, {"params": others}], 2e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=0.05, patience=0)
        follow = {"scheduler": plateau, "monitor": "val/loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": follow}


class StopBelow(pl.Callback):
    """Asks to stop as soon as a logged value is low enough."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.callback_metrics["train/loss"] < self.limit:
            trainer.should_stop = True


class CountValidations(pl.Callback):
    """Counts validations, as hooks see them."""

    def __init__(self) -> None:
        self.validations = 0
        self.sanity_checks = 0

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.sanity_checks += trainer.sanity_checking
        self.validations += not trainer.sanity_checking


@dataclass
class FeatureJob(Job):
    """One of the feature sets below."""

    name: str = ""

    def module(self) -> Module:
        return Scheduled(super().module().model, self)

    def callbacks(self) -> list[pl.Callback]:
        saver = ModelCheckpoint(monitor="val/loss", save_top_k=2, filename="{epoch}-{step}")
        common = [CountValidations(), LearningRateMonitor(), saver]
        return common + {
            "windows": [EarlyStopping("val/loss", patience=1, min_delta=0.05)],
            "schedule": [GradientAccumulationScheduler({0: 1, 1: 2})],
            "stop": [StopBelow(5.3)],
        }.get(self.name, [])


SETS = [
    FeatureJob(
        name="windows",  # windows end with the epoch and with training, and are clipped
        num_batches=5,
        trainer={
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "val_check_interval": 2,
            "limit_val_batches": 3,
            "max_epochs": 6,
        },
    ),
    FeatureJob(
        name="schedule",
        num_batches=6,
        trainer={
            "gradient_clip_val": 0.002,
            "gradient_clip_algorithm": "value",
            "limit_train_batches": 0.5,
            "check_val_every_n_epoch": 2,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "max_epochs": 2,
        },
    ),
    FeatureJob(
        name="stop",
        num_batches=4,
        trainer={"overfit_batches": 2, "max_epochs": 8, "min_steps": 3, "num_sanity_val_steps": 0},
    ),
    FeatureJob(name="steps", num_batches=4, trainer={"max_epochs": -1, "max_steps": 6}),
    FeatureJob(name="dev", num_batches=4, trainer={"fast_dev_run": 2, "max_epochs": 3}),
]


def fit(job: FeatureJob, options: dict[str, Any] | None, devices: int, root: Path) -> Any:
    root = root / job.name
    callbacks = job.callbacks()
    job.trainer = {
        **job.trainer,
        "callbacks": callbacks,
        "enable_checkpointing": True,
        "logger": CSVLogger(root),
        "log_every_n_steps": 1,
    }
    module = job.module()
    strategy = None if options is None else EntrainStrategy(**options)
    trainer = job.make_trainer(strategy, devices, root)
    loader = job.loader(trainer, module)
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, loader, verbose=False)
    counter, monitor, saver = callbacks[:3]
    assert isinstance(counter, CountValidations)
    assert isinstance(monitor, LearningRateMonitor)
    assert isinstance(saver, ModelCheckpoint)
    rows = []
    if trainer.global_rank == 0 and (log := list(root.rglob("metrics.csv"))):
        with log[0].open() as file:
            rows = [{k: v and float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    return {
        "losses": module.losses,
        "val_losses": module.val_losses,
        "steps": [trainer.global_step, trainer.current_epoch, trainer.num_training_batches],
        "counts": [counter.sanity_checks, counter.validations],
        "metrics": metrics,
        "validated": validated,
        "rates": monitor.lrs,
        "best": sorted(Path(p).name for p in saver.best_k_models),
        "scores": sorted(float(score) for score in saver.best_k_models.values()),
        "rows": rows,
        "parameters": {n: p.detach().numpy().copy() for n, p in module.named_parameters()},
    }


def fit_all(options: dict[str, Any] | None, devices: int, root: Path) -> dict[str, Any]:
    return {job.name: fit(job, options, devices, root) for job in SETS}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit_all(None, 1, tmp_path_factory.mktemp("one"))


def assert_close(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_close(found[name], value, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (where, found, expected)
        for index, value in enumerate(expected):
            assert_close(found[index], value, f"{where}/{index}")
    elif isinstance(expected, str | int):
        assert found == expected, where
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-5, err_msg=where)


def test_the_sets_show_what_they_are_for(one: dict[str, Any]) -> None:
    windows, schedule, stop = one["windows"], one["schedule"], one["stop"]
    assert 1 < windows["steps"][1] < 6, "stops early"
    assert windows["steps"][0] == 3 * windows["steps"][1] - 1, (
        "incomplete windows end epochs, not the last"
    )
    assert len(set(windows["rates"]["lr-AdamW/pg1"])) > 1
    assert windows["counts"][0] == 1
    assert schedule["steps"] == [3 + 2, 2, 3]
    assert 3 < stop["steps"][0] < 16
    assert one["steps"]["steps"][0] == 6
    assert len(one["dev"]["losses"]) == 2
    assert any(name.startswith("train/mean_epoch") for name in windows["metrics"])
    assert len(windows["best"]) == 2


@pytest.mark.parametrize(("devices", "options"), LAYOUTS)
def test_features(
    devices: int, options: dict[str, Any], one: dict[str, Any], tmp_path: Path
) -> None:
    for rank, found in enumerate(run_ranks(devices, fit_all, options, devices, tmp_path)):
        for name, expected in one.items():
            for key, value in expected.items():
                if key == "parameters":
                    for tensor, parameter in found[name][key].items():
                        distance = np.linalg.norm(parameter - value[tensor])
                        assert distance <= 1e-4 * np.linalg.norm(value[tensor]), tensor
                elif key != "rows" or rank == 0:
                    assert_close(found[name][key], value, f"rank {rank} {name}/{key}")


def _fit_for_a_second(root: Path) -> list[Any]:
    timer = Timer(duration={"seconds": 1}, interval="step")
    job = Job(num_batches=2, trainer={"max_epochs": -1, "callbacks": [timer]})
    module = job.module()
    trainer = job.make_trainer(EntrainStrategy(), 2, root)
    trainer.fit(module, job.loader(trainer, module))
    return [trainer.global_step, timer.time_elapsed() >= 1]


def test_max_time_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, _fit_for_a_second, tmp_path)
    assert first[0] == second[0] > 1
    assert first[1]


class Manual(Module):
    """Two optimizers that take turns; the second steps on the sum of two batches' gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if self.job.seed:
                self.toggle_optimizer(optimizer)
            loss = self.model(batch)
            self.losses.append(loss.item())
            if index:
                self.manual_backward(loss / 2)
            else:
                loss.backward()
            if index == 0 or batch_idx % 2:
                if self.job.seed:
                    self.clip_gradients(optimizer, 0.05, "norm")
                else:
                    self.on_before_optimizer_step(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            if self.job.seed:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        encoder = torch.optim.SGD(self.model.encoder.parameters(), lr=0.05)
        return encoder, torch.optim.AdamW(self.model.llm.parameters(), lr=1e-3)


class ManualJob(Job):
    def module(self) -> Module:
        return Manual(super().module().model, self)


def _fit_manual(options: dict[str, Any] | None, devices: int, root: Path) -> list[Any]:
    strategies = [None if options is None else EntrainStrategy(**options) for _ in range(2)]
    return [
        ManualJob(num_batches=4, seed=seed).fit(strategies[seed], devices, root).to_numpy()
        for seed in range(2)
    ]


@pytest.mark.parametrize(("devices", "options"), LAYOUTS)
def test_manual_optimization(devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    whole = _fit_manual(None, 1, tmp_path)
    for found in run_ranks(devices, _fit_manual, options, devices, tmp_path):
        for rank, one in zip(found, whole, strict=True):
            np.testing.assert_allclose(rank.losses, one.losses, rtol=1e-5)
            for name, parameter in rank.parameters.items():
                distance = np.linalg.norm(parameter - one.parameters[name])
                assert distance <= 1e-5 * np.linalg.norm(one.parameters[name]), name


class StopOnOneRank(pl.Callback):
    """A condition that only one rank sees."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            trainer.should_stop = True


def _fit_until_one_rank_stops(root: Path) -> list[Any]:
    job = Job(trainer={"callbacks": [StopOnOneRank()]})
    module = job.module()
    trainer = job.make_trainer(EntrainStrategy(llm_stages=2), 3, root)
    trainer.fit(module, job.loader(trainer, module))
    return [trainer.global_step, [type(c).__name__ for c in trainer.callbacks]]


def test_a_wish_to_stop_on_one_rank_stops_all(tmp_path: Path) -> None:
    for step, callbacks in run_ranks(3, _fit_until_one_rank_stops, tmp_path):
        assert step == 3
        assert callbacks == ["StopOnOneRank"]
