"""Training resumed from a checkpoint goes on as if it had not stopped."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_entrain.checkpoint.files import EntrainCheckpointIO
from lightning_entrain.checkpoint.write_queue import WriteQueue
from tests.distributed.checkpoint_runs import BATCHES_PER_EPOCH, Run, fit
from tests.distributed.ranks import run_ranks

Results = list[tuple[list[float], dict[str, np.ndarray]]]


def run_of(root: Path, **options: Any) -> Run:
    run = Run(root, **options)
    data = run.data()
    data.prepare_data()
    data.setup()
    train = data.train_dataloader()
    assert len(train) == BATCHES_PER_EPOCH < run.num_steps < 2 * BATCHES_PER_EPOCH
    return run


def resumed(run: Run, step: int, **changes: Any) -> Results:
    options = {"save_every": None, "ckpt_path": str(run.root / f"step={step}.ckpt"), **changes}
    run = replace(run, **options)
    if run.strategy is None:
        return [fit(run)]
    return run_ranks(run.devices, fit, run)


def fit_while_writing_late(run: Run) -> Results:
    """Every checkpoint is written after the step that follows it, which must not show in it."""
    write = WriteQueue._run

    def write_late(queue: WriteQueue, task: Any) -> None:
        time.sleep(0.3)
        write(queue, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteQueue, "_run", write_late)
        return run_ranks(run.devices, fit, run)


def assert_goes_on(results: Results, whole: Results, step: int, *, exactly: bool) -> None:
    for rank, (losses, parameters) in enumerate(results):
        expected_losses, expected = whole[rank if exactly else 0]
        if exactly:
            assert losses == expected_losses[step:]
        np.testing.assert_allclose(losses, expected_losses[step:], rtol=1e-5)
        for name, value in parameters.items():
            if name in expected:
                difference = np.linalg.norm(value - expected[name])
                limit = 0 if exactly else 1e-4 * np.linalg.norm(expected[name])
                assert difference <= limit, name


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Results]:
    """Two ranks that draw different random numbers and write shards in the background."""
    run = run_of(
        tmp_path_factory.mktemp("shards"),
        devices=2,
        strategy={"checkpoint": "sharded", "async_checkpoint": True},
        save_every=1,
        uneven=True,
    )
    return run, fit_while_writing_late(run)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Results]:
    """Three ranks that draw equal random numbers and write files; loaders have a worker."""
    run = run_of(
        tmp_path_factory.mktemp("file"),
        devices=3,
        strategy={"llm_stages": 2, "async_checkpoint": True},
        save_every=1,
        num_workers=1,
        assignment="joint",
    )
    return run, fit_while_writing_late(run)


@pytest.mark.parametrize(("step", "num_workers"), [(3, 1), (BATCHES_PER_EPOCH, 0)])
def test_exactly_on_two_ranks_from_shards(
    shards: tuple[Run, Results], step: int, num_workers: int
) -> None:
    run, whole = shards
    assert_goes_on(resumed(run, step, num_workers=num_workers), whole, step, exactly=True)


def test_exactly_on_three_ranks_from_a_file(file: tuple[Run, Results]) -> None:
    run, whole = file
    saved = EntrainCheckpointIO().load_checkpoint(run.root / "step=3.ckpt")
    assert saved["losses"] == whole[0][0][:3]
    assert_goes_on(resumed(run, 3), whole, 3, exactly=True)


def test_on_other_replicas_from_a_file(file: tuple[Run, Results]) -> None:
    run, whole = file
    results = resumed(run, 2, devices=4, strategy={"replicas": 2}, num_workers=0)
    assert_goes_on(results, whole, 2, exactly=False)


def test_between_shards_of_replicas_and_one_process(tmp_path: Path) -> None:
    one = run_of(tmp_path, save_every=3, noisy=False)
    one_result = [fit(one)]
    # The file of Lightning's own strategy, read by two replicas that go on with shards.
    many = {"devices": 4, "strategy": {"replicas": 2, "checkpoint": "sharded"}}
    trainer = {"callbacks": [], "enable_checkpointing": False}
    saving = replace(one, root=tmp_path / "many")
    results = resumed(one, 3, **many, num_steps=9, save_every=2, root=saving.root)
    assert_goes_on(results, one_result, 3, exactly=False)
    # Those shards, read without the strategy.
    plugins = {**trainer, "plugins": [EntrainCheckpointIO()]}
    again = resumed(saving, 8, strategy=None, devices=1, trainer=plugins, num_steps=9)
    assert_goes_on(again, one_result, 8, exactly=False)
