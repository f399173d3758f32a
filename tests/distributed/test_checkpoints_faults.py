"""Whatever happens while a checkpoint is written, the former one stays whole."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_entrain.checkpoint import files, sharded
from lightning_entrain.strategy import INTERRUPTED
from tests.distributed.checkpoint_runs import Run, fit
from tests.distributed.ranks import Ranks, run_ranks


def prepared(run: Run) -> Run:
    data = run.data()
    data.prepare_data()
    data.setup()
    return run


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix == ".ckpt")


@pytest.mark.parametrize(
    ("checkpoint", "in_background", "full_rank"),
    [("consolidated", False, 0), ("consolidated", True, 0), ("sharded", True, 1)],
)
def test_a_full_disk_ends_all_ranks_and_spares_the_former_checkpoint(
    checkpoint: str, in_background: bool, full_rank: int, tmp_path: Path
) -> None:
    def fill_disk(module: Any, rank: int, batch_idx: int) -> None:
        if rank == full_rank and batch_idx == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    strategy = {"checkpoint": checkpoint, "async_checkpoint": in_background}
    run = Run(
        tmp_path,
        devices=2,
        strategy=strategy,
        save_every=2,
        save_top_k=1,
        before_step=fill_disk,
    )
    outcomes = Ranks(2, fit, prepared(run)).outcomes()
    for kind, text in outcomes:
        assert kind == "error"
        first_line = text.splitlines()[0]
        assert first_line.startswith("CheckpointError: The checkpoint"), text
        expected = f"step=4.ckpt could not be written: rank {full_rank} failed: OSError: [Errno 27]"
        assert expected in first_line
    assert checkpoints(tmp_path) == ["step=2.ckpt"]
    whole = files.EntrainCheckpointIO().load_checkpoint(tmp_path / "step=2.ckpt")
    assert whole["global_step"] == 2
    assert len(whole["optimizer_states"][0]["state"]) == len(whole["state_dict"])


@pytest.mark.parametrize("checkpoint", ["consolidated", "sharded"])
def test_a_kill_while_writing_in_the_background_spares_the_former_checkpoint(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    save = files.save_synced

    def save_slowly(value: Any, path: Path) -> None:
        save(value, path)
        if value["global_step"] == 4:
            path.write_bytes(path.read_bytes()[:1000])
            begun.touch()
            time.sleep(1000)

    for module in (files, sharded):
        monkeypatch.setattr(module, "save_synced", save_slowly)

    def kill(module: Any, rank: int, batch_idx: int) -> None:
        if rank == 0 and batch_idx == 4:
            while not begun.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    strategy = {"checkpoint": checkpoint, "async_checkpoint": True}
    run = Run(tmp_path, devices=2, strategy=strategy, save_every=2, save_top_k=1, before_step=kill)
    run = replace(run, trainer={"limit_val_batches": 0})
    outcomes = Ranks(2, fit, prepared(run)).outcomes()
    assert outcomes[0] == ("ended", -signal.SIGKILL)
    assert checkpoints(tmp_path) == ["step=2.ckpt"]
    assert files.EntrainCheckpointIO().load_checkpoint(tmp_path / "step=2.ckpt")["global_step"] == 2


def test_sigterm_inside_an_accumulation_loses_nothing(tmp_path: Path) -> None:
    def terminate(module: Any, rank: int, batch_idx: int) -> None:
        if rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = {"accumulate_grad_batches": 2, "limit_train_batches": 4}
    whole = prepared(
        Run(
            tmp_path,
            devices=2,
            strategy={"async_checkpoint": True},
            num_steps=4,
            trainer=trainer,
            uneven=True,
        )
    )
    expected = run_ranks(2, fit, whole)
    outcomes = Ranks(2, fit, replace(whole, before_step=terminate)).outcomes()
    assert [text.split(":")[0] for _, text in outcomes] == ["SIGTERMException"] * 2
    path = tmp_path / INTERRUPTED
    assert files.EntrainCheckpointIO().load_checkpoint(path)["global_step"] == 2
    rest = run_ranks(2, fit, replace(whole, ckpt_path=str(path)))
    for (losses, parameters), (all_losses, all_parameters) in zip(rest, expected, strict=True):
        assert losses == all_losses[4:]
        assert all((parameters[name] == all_parameters[name]).all() for name in parameters)
