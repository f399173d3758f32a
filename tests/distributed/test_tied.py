"""Embedding and head tied across stages: as on one process, and in checkpoints once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal

EMBEDDING, HEAD = "model.llm.model.embed_tokens.weight", "model.llm.lm_head.weight"


@dataclass
class TiedJob(Job):
    spoil_head: bool = False
    """Whether the last of three ranks starts from other values."""

    def module(self) -> Module:
        module = super().module()
        assert module.model.llm.tied_parameters()
        if self.spoil_head and os.environ.get("LOCAL_RANK") == "2":
            with torch.no_grad():
                module.model.llm.lm_head.weight.mul_(1.5)
        return module


JOB = TiedJob(
    num_batches=6,
    model={"tie_word_embeddings": True},
    trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
)


def under_first_name(outcome: Outcome) -> Outcome:
    """The head's copy takes the name that the parameter has on one process."""
    for part in (outcome.first_gradients, outcome.parameters):
        if HEAD in part:
            assert EMBEDDING not in part
            part[EMBEDDING] = part.pop(HEAD)
    return outcome


def fit_saving(job: Job, options: dict[str, Any] | None, devices: int, root: Path) -> Outcome:
    saver = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=2)
    options_of_trainer = {**job.trainer, "callbacks": [saver], "enable_checkpointing": True}
    strategy = None if options is None else EntrainStrategy(**options)
    return replace(job, trainer=options_of_trainer).fit(strategy, devices, root).to_numpy()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("one")
    return fit_saving(JOB, None, 1, root), root / "step=2.ckpt"


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(3, {"llm_stages": 2, "schedule": "zero_bubble"}, id="1+2"),
        pytest.param(2, {"llm_stages": 1, "schedule": "zero_bubble"}, id="1+1, one holder"),
        pytest.param(6, {"llm_stages": 2, "replicas": 2}, id="2x(1+2)"),
    ],
)
def test_tied_embedding_and_head(
    devices: int, options: dict[str, Any], one: Any, tmp_path: Path
) -> None:
    expected, saved_by_one = one
    ranks = run_ranks(devices, fit_saving, JOB, options, devices, tmp_path)
    assert_equal(
        [under_first_name(rank) for rank in ranks], expected, parameters=1e-4, gradients=1e-6
    )
    copies = [rank.parameters[EMBEDDING] for rank in ranks if EMBEDDING in rank.parameters]
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
    found, alone = (
        torch.load(path, weights_only=True) for path in (tmp_path / "step=2.ckpt", saved_by_one)
    )
    state = found["state_dict"]
    assert list(state) == list(alone["state_dict"])
    assert state[HEAD].data_ptr() == state[EMBEDDING].data_ptr()
    ours, theirs = found["optimizer_states"][0], alone["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])


@pytest.mark.parametrize("checkpoint", ["consolidated", "sharded"])
def test_resume_from_a_checkpoint(checkpoint: str, one: Any, tmp_path: Path) -> None:
    options = {"llm_stages": 2, "checkpoint": checkpoint}
    run_ranks(3, fit_saving, JOB, options, 3, tmp_path)
    path = tmp_path / "step=2.ckpt"
    job = replace(JOB, ckpt_path=str(path), skip_batches=4, trainer={**JOB.trainer, "max_steps": 3})
    for devices, layout in ((3, {"llm_stages": 2}), (3, {"encoder_stages": 2})):
        for rank in run_ranks(devices, fit_on_rank, job, layout, devices, tmp_path):
            np.testing.assert_allclose(rank.losses[:2], one[0].losses[4:], rtol=1e-5)
            for name, parameter in under_first_name(rank).parameters.items():
                np.testing.assert_allclose(parameter, one[0].parameters[name], atol=1e-4)


def _fit_twice(job: Job, options: dict[str, Any] | None, devices: int, root: Path) -> list[float]:
    module = job.module()
    strategy = EntrainStrategy(**options) if options is not None else None
    trainer = job.make_trainer(strategy, devices, root)
    loader = job.loader(trainer, module)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    return module.losses


def test_a_second_fit_and_unequal_starts(tmp_path: Path) -> None:
    job = replace(JOB, num_batches=2, trainer={})
    losses = _fit_twice(job, None, 1, tmp_path)
    assert len(losses) == 4
    spoiled = replace(job, spoil_head=True)
    for found in run_ranks(3, _fit_twice, spoiled, {"llm_stages": 2}, 3, tmp_path):
        assert found == pytest.approx(losses, rel=1e-5)
