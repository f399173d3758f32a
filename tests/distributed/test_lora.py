"""Adapter-only training: as on one process, with the same names in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_entrain.models.freezing import freeze
from lightning_entrain.models.lora import LoraOptions, add_lora
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal


@dataclass
class LoraJob(Job):
    encoder: bool = True

    def module(self) -> Module:
        module = super().module()
        options = LoraOptions(rank=4, dropout=0.2)
        add_lora(module.model, encoder=options if self.encoder else None, llm=options)
        if not self.encoder:
            freeze(module.model, ["encoder", "projector"])
        return module


BOTH = LoraJob(
    num_batches=3,
    batch_size=12,
    num_microbatches=4,
    policy="entrain",
    trainer={"gradient_clip_val": 0.01},
)
LLM_ALONE = replace(BOTH, encoder=False)


def fit_saving(job: Job, options: dict[str, Any] | None, devices: int, root: Path) -> Outcome:
    saver = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = {**job.trainer, "callbacks": [saver], "enable_checkpointing": True}
    strategy = None if options is None else EntrainStrategy(**options)
    return replace(job, trainer=trainer).fit(strategy, devices, root).to_numpy()


@pytest.mark.parametrize(
    ("job", "devices", "options"),
    [
        pytest.param(BOTH, 3, {"llm_stages": 2, "schedule": "zero_bubble"}, id="both, 1+2"),
        pytest.param(LLM_ALONE, 4, {"replicas": 2, "schedule": "zero_bubble"}, id="llm, 2x(1+1)"),
    ],
)
def test_adapters(job: LoraJob, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    alone, many = tmp_path / "one", tmp_path / "many"
    one = fit_saving(job, None, 1, alone)
    assert all("lora_" in name for name in one.first_gradients)
    ranks = run_ranks(devices, fit_saving, job, options, devices, many)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)
    files = [torch.load(root / "step=3.ckpt", weights_only=True) for root in (many, alone)]
    assert list(files[0]["state_dict"]) == list(files[1]["state_dict"])
    states = [file["optimizer_states"][0]["state"] for file in files]
    assert list(states[0]) == list(states[1])
    resumed = replace(job, ckpt_path=str(many / "step=1.ckpt"), skip_batches=1)
    found = fit_on_rank(resumed, {"schedule": "1f1b"}, 1, tmp_path)
    np.testing.assert_allclose(found.losses[:2], one.losses[1:], rtol=1e-5)
