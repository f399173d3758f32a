"""A checkpoint of any layout is a single-device checkpoint, and loads into any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_entrain.errors import CheckpointError
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks

JOB = Job(num_batches=8, trainer={"max_steps": 4})


def fit_and_save(job: Job, options: dict[str, Any] | None, devices: int, root: Path) -> None:
    saver = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=4)
    trainer = {**job.trainer, "callbacks": [saver], "enable_checkpointing": True}
    strategy = None if options is None else EntrainStrategy(**options)
    replace(job, trainer=trainer).fit(strategy, devices, root)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    job = replace(JOB, trainer={})
    return job.fit(None, 1, tmp_path_factory.mktemp("straight")).to_numpy()


def saved_by(options: dict[str, Any] | None, devices: int, root: Path) -> Path:
    if options is None:
        fit_and_save(JOB, None, 1, root)
    else:
        run_ranks(devices, fit_and_save, JOB, options, devices, root)
    return root / "step=4.ckpt"


ROUTES = [
    pytest.param((3, {"llm_stages": 2}), (3, {"encoder_stages": 2}), id="1+2 to 2+1"),
    pytest.param((1, None), (4, {"encoder_stages": 2}), id="one process to 2+2"),
]


@pytest.mark.parametrize(("first", "second"), ROUTES)
def test_resume_on_another_layout(
    first: tuple[int, Any], second: tuple[int, Any], straight: Outcome, tmp_path: Path
) -> None:
    path = saved_by(first[1], first[0], tmp_path)
    # The loader restarts at batch 0 on resume, so the batches that were seen are put aside here.
    job = replace(JOB, trainer={}, ckpt_path=str(path), skip_batches=4)
    ranks = run_ranks(second[0], fit_on_rank, job, second[1], second[0], tmp_path)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, straight.losses[4:], rtol=1e-5)
        for name, parameter in rank.parameters.items():
            difference = np.linalg.norm(parameter - straight.parameters[name])
            assert difference < 1e-4 * np.linalg.norm(straight.parameters[name]), name


def test_file_equals_that_of_one_process(tmp_path: Path) -> None:
    one = torch.load(saved_by(None, 1, tmp_path / "one"), weights_only=True)
    many = torch.load(saved_by({"llm_stages": 2}, 3, tmp_path / "many"), weights_only=True)
    assert list(many["state_dict"]) == list(one["state_dict"])
    torch.testing.assert_close(many["state_dict"], one["state_dict"], rtol=1e-4, atol=1e-6)
    saved, expected = many["optimizer_states"][0], one["optimizer_states"][0]
    assert saved["param_groups"] == expected["param_groups"]
    assert list(saved["state"]) == list(expected["state"])
    torch.testing.assert_close(saved["state"], expected["state"], rtol=1e-3, atol=1e-6)
    assert many["lr_schedulers"] == one["lr_schedulers"]


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = saved_by({}, 2, tmp_path)
    job = replace(JOB, encoder_layers=4, ckpt_path=str(path))
    with pytest.raises(CheckpointError, match=r"lacks \d+ of the model's tensors"):
        fit_on_rank(job, {}, 1, tmp_path)
