"""Validation, tests and predictions of a pipeline give what one process gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.distributed.checkpoint_runs import Run
from tests.distributed.ranks import run_ranks


def num_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum()


def evaluate(run: Run) -> dict[str, Any]:
    """Train, then use the best checkpoint in every way."""
    saver = ModelCheckpoint(dirpath=run.root, monitor="val/loss", every_n_train_steps=2)
    trainer = {"callbacks": [saver], "enable_checkpointing": True, "limit_val_batches": 2}
    trainer.update(val_check_interval=2, max_steps=4)
    run = replace(run, trainer=trainer, noisy=False)
    pl.seed_everything(1, verbose=False)
    module, data = run.module(), run.data()
    module.model.scalars["num_labels"] = num_labels
    trainer = run.make_trainer()
    trainer.fit(module, datamodule=data)
    best = {"ckpt_path": "best", "datamodule": data, "verbose": False}
    found: dict[str, Any] = {"score": float(saver.best_model_score)}
    # In between the module forgets what it was taught; the checkpoint must bring it back.
    for name in ("validate", "test"):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        found[name] = getattr(trainer, name)(module, **best)[0]
    predictions = trainer.predict(module, datamodule=data)
    found["predictions"] = [{k: v.tolist() for k, v in each.items()} for each in predictions]
    return found


def test_best_checkpoint_on_pipelines_and_on_one_process(tmp_path: Path) -> None:
    one_run = Run(tmp_path / "one")
    data = one_run.data()
    data.prepare_data()
    data.setup()
    one = evaluate(one_run)
    assert one["validate"]["val/loss"] == pytest.approx(one["score"], rel=1e-5)
    assert one["predictions"][0]["num_labels"] == one["predictions"][0]["num_label_tokens"] > 0
    seen = [i for each in one["predictions"] for i in each["sample_indices"]]
    assert sorted(seen) == data.part("test")
    strategies = [(3, {"llm_stages": 2}), (2, {"checkpoint": "sharded", "replicas": 2})]
    for devices, strategy in strategies:
        run = Run(tmp_path / f"{devices}", devices=devices, strategy=strategy)
        run.data().prepare_data()
        for rank in run_ranks(devices, evaluate, run):
            for phase in ("validate", "test"):
                assert rank[phase] == pytest.approx(one[phase], rel=1e-5)
            assert len(rank["predictions"]) == len(one["predictions"])
            for found, expected in zip(rank["predictions"], one["predictions"], strict=True):
                assert found.pop("sample_indices") == expected["sample_indices"]
                rest = {k: v for k, v in expected.items() if k != "sample_indices"}
                assert found == pytest.approx(rest, rel=1e-5)
