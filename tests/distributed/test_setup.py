"""What the strategy refuses, before anything runs, and repeated use of one Trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.layout import LayoutRequest, even_ranges
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Batches, Job, Module
from tests.distributed.ranks import run_ranks


def trainer(devices: int, tmp_path: Path, **options: Any) -> pl.Trainer:
    return Job(trainer=options.pop("trainer", {})).make_trainer(
        EntrainStrategy(**options), devices, tmp_path
    )


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (3, {"encoder_stages": 1, "llm_stages": 1}, r"3 device\(s\) for 1 replica.*devices=2"),
        (3, {"replicas": 2}, r"3 device\(s\) cannot hold 2 replicas"),
        (2, {"encoder_stages": 2}, "encoder_stages=2 leaves no rank.*at most 1"),
        (2, {"llm_stages": 0}, "llm_stages is 0.*at least 1"),
        (2, {"replicas": 1.5}, "replicas is 1.5.*whole number"),
        (2, {"timeout_seconds": 0}, "timeout_seconds is 0"),
    ],
)
def test_numbers_that_do_not_fit(
    devices: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(devices, tmp_path, **options)


def test_fp16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision='16-true'.*bf16-mixed"):
        trainer(2, tmp_path, trainer={"precision": "16-true"})


def test_more_stages_than_layers_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    job = Job(llm_layers=2)
    with pytest.raises(ConfigError, match=r"llm_stages=3 for a module of 2 layer\(s\)"):
        trainer(4, tmp_path, llm_stages=3).fit(job.module(), [0])


class Plain(pl.LightningModule):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Plain holds 0 EntrainModels.*devices=1"):
        trainer(2, tmp_path).fit(Plain(net=nn.Linear(2, 2)), [0])


def test_a_module_with_two_models_is_refused(tmp_path: Path) -> None:
    models = {"first": Job().module().model, "second": Job().module().model}
    with pytest.raises(ConfigError, match=r"holds 2 EntrainModels \(first, second\)"):
        trainer(2, tmp_path).fit(Plain(**models), [0])


def test_parameters_outside_the_model_are_refused(tmp_path: Path) -> None:
    module = Plain(model=Job().module().model, head=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"trains 'head.weight' outside its EntrainModel"):
        trainer(2, tmp_path).fit(module, [0])


def test_a_batch_that_is_not_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"called with a Tensor.*EntrainDataModule"):
        trainer(1, tmp_path).fit(Job().module(), DataLoader([torch.zeros(2)], batch_size=None))


def test_a_batch_for_other_replicas_is_refused(tmp_path: Path) -> None:
    job = Job()
    batches = [Batches(job, 2, EntrainStrategy().data_needs)[0]]
    with pytest.raises(ConfigError, match=r"assigned to 2 replica\(s\).*runs 1"):
        trainer(1, tmp_path).fit(job.module(), DataLoader(batches, batch_size=None))


@pytest.mark.parametrize(
    "order", ["lightning.pytorch, lightning_entrain", "lightning_entrain, lightning.pytorch"]
)
def test_the_name_is_registered_in_any_order_of_imports(order: str) -> None:
    code = f"import {order}; from lightning.pytorch.strategies import StrategyRegistry as r; "
    code += "assert 'entrain' in r and type(r.get('entrain')).__name__ == 'EntrainStrategy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_without_torch_or_lightning() -> None:
    code = "import sys, lightning_entrain; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_name_makes_the_strategy(tmp_path: Path) -> None:
    made = pl.Trainer(strategy="entrain", accelerator="cpu", default_root_dir=str(tmp_path))
    assert isinstance(made.strategy, EntrainStrategy)


def _fit_validate_fit(job: Job, options: dict[str, Any], devices: int, root: Path) -> list[Any]:
    module: Module = job.module()
    made = job.make_trainer(
        EntrainStrategy(**options) if options is not None else None, devices, root
    )
    loader = job.loader(made, module)
    made.fit(module, loader)
    between = made.validate(module, loader, verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, loader)
    return [module.losses, between]


def test_fit_validate_and_fit_again_on_one_trainer(tmp_path: Path) -> None:
    job = Job(num_batches=3)
    one = _fit_validate_fit(job, None, 1, tmp_path)
    assert len(one[0]) == 6
    for losses, between in run_ranks(3, _fit_validate_fit, job, {"llm_stages": 2}, 3, tmp_path):
        assert losses == pytest.approx(one[0], rel=1e-5)
        assert between[0]["val/loss"] == pytest.approx(one[1][0]["val/loss"], rel=1e-5)


@given(st.integers(1, 60), st.integers(1, 60))
def test_even_ranges_cover_the_layers(num_layers: int, num_stages: int) -> None:
    num_stages = min(num_layers, num_stages)
    ranges = even_ranges(num_layers, num_stages)
    lengths = [stop - start for start, stop in ranges]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(num_layers))
    assert max(lengths) - min(lengths) <= 1
    assert len(ranges) == num_stages


def test_the_default_layout_follows_the_parameters() -> None:
    layout = LayoutRequest(world_size=8).resolve(
        encoder_layers=8, llm_layers=8, encoder_weight=3.0, llm_weight=1.0
    )
    assert (len(layout.encoder_ranges), len(layout.llm_ranges)) == (6, 2)
    lopsided = LayoutRequest(world_size=4).resolve(
        encoder_layers=8, llm_layers=8, encoder_weight=1.0, llm_weight=1e6
    )
    assert (len(lopsided.encoder_ranges), len(lopsided.llm_ranges)) == (1, 3)
