"""Dropout: every layout, schedule and recomputation drops what one process drops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_entrain.models.recompute import recompute_layers
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal


@dataclass
class DropoutJob(Job):
    rate: float = 0.2
    recompute: str = "none"

    def module(self) -> Module:
        module = super().module()
        model = module.model
        for layer in (*model.encoder.blocks, *model.llm.model.layers):
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(self.rate))
        model.llm.model.norm = nn.Sequential(model.llm.model.norm, nn.Dropout(self.rate))
        model.encoder.merger.mlp[1] = nn.Sequential(nn.GELU(), nn.Dropout(self.rate))
        model.count_dropout(seed=3)
        recompute_layers(model.encoder, self.recompute)
        recompute_layers(model.llm, self.recompute)
        return module


JOB = DropoutJob(num_batches=4, batch_size=12, num_microbatches=4, policy="entrain", validate=True)


def fit_saving(job: Job, options: dict[str, Any] | None, devices: int, root: Path) -> Outcome:
    saver = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = {**job.trainer, "callbacks": [saver], "enable_checkpointing": True}
    strategy = None if options is None else EntrainStrategy(**options)
    return replace(job, trainer=trainer).fit(strategy, devices, root).to_numpy()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("one")
    dry = replace(JOB, rate=0.0, num_batches=1).fit(None, 1, root).to_numpy()
    found = JOB.fit(None, 1, root).to_numpy()
    assert abs(dry.losses[0] / found.losses[0] - 1) > 1e-4  # something is dropped
    return found


@pytest.mark.parametrize(
    ("devices", "options", "recompute"),
    [
        pytest.param(4, {"encoder_stages": 2, "schedule": "1f1b_split"}, "none", id="2+2"),
        pytest.param(3, {"llm_stages": 2, "schedule": "zero_bubble"}, "full", id="1+2 recomputed"),
        pytest.param(4, {"replicas": 2, "schedule": "zero_bubble"}, "mlp", id="2x(1+1)"),
    ],
)
def test_masks_are_those_of_one_process(
    devices: int, options: dict[str, Any], recompute: str, one: Outcome, tmp_path: Path
) -> None:
    job = replace(JOB, recompute=recompute)
    ranks = run_ranks(devices, fit_on_rank, job, options, devices, tmp_path)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)
    np.testing.assert_allclose(ranks[0].val_losses, one.val_losses, rtol=1e-5)


def test_a_resumed_run_drops_what_an_uninterrupted_one_does(one: Outcome, tmp_path: Path) -> None:
    first = replace(JOB, trainer={"max_steps": 2}, validate=False)
    run_ranks(2, fit_saving, first, {}, 2, tmp_path)
    job = replace(
        JOB,
        ckpt_path=str(tmp_path / "step=2.ckpt"),
        skip_batches=2,
        validate=False,
        trainer={"max_steps": 4},
    )
    for rank in run_ranks(3, fit_on_rank, job, {"llm_stages": 2}, 3, tmp_path):
        np.testing.assert_allclose(rank.losses[:2], one.losses[2:], rtol=1e-5)
