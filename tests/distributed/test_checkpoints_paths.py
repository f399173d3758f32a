"""Where a checkpoint goes, and what is copied for it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing._internal.two_tensor import TwoTensor

from lightning_entrain.checkpoint.gather import copy_to_host
from lightning_entrain.checkpoint.sharded import is_sharded, read_sharded
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import run_ranks


class Saving(Module):
    """Every rank names the checkpoint by itself, as with the time in its name."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(self.job.root / f"by_rank_{self.global_rank}.ckpt")  # type: ignore[attr-defined]


class SavingJob(Job):
    root = Path()

    def module(self) -> Module:
        return Saving(super().module().model, self)


def _fit(checkpoint: str, root: Path) -> int:
    """How often this rank copied a whole checkpoint."""
    strategy = EntrainStrategy(llm_stages=2, checkpoint=checkpoint, async_checkpoint=True)
    snapshots = []
    plain = strategy._snapshot
    strategy._snapshot = lambda found: snapshots.append(0) or plain(found)  # type: ignore
    saver = ModelCheckpoint(dirpath=root / "others", every_n_train_steps=1)
    job = SavingJob(num_batches=2, trainer={"enable_checkpointing": True, "callbacks": [saver]})
    job.root = root
    job.fit(strategy, 3, root)
    return len(snapshots)


def test_a_sharded_checkpoint_has_the_name_that_rank_0_gives_it(tmp_path: Path) -> None:
    assert run_ranks(3, _fit, "sharded", tmp_path) == [4, 4, 4]
    (found,) = tmp_path.glob("by_rank_*")
    assert found.name == "by_rank_0.ckpt"
    assert is_sharded(found)
    assert len(read_sharded(found)["state_dict"]) == len(Job().module().state_dict())


def test_only_rank_0_copies_a_consolidated_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(3, _fit, "consolidated", tmp_path) == [4, 0, 0]
    names = torch.load(tmp_path / "by_rank_0.ckpt", weights_only=True)["state_dict"]
    assert list(names) == list(Job().module().state_dict())


def test_copies_on_the_host_do_not_change_any_more() -> None:
    weight = torch.arange(6.0).view(2, 3)
    tied = weight.detach()
    rows = [weight[0], weight.T]
    checkpoint = {"state_dict": {"a": weight, "b": tied}, "rest": (rows, {"n": 1}, torch.empty(0))}
    memo: dict[int, Any] = {}
    copy_to_host(checkpoint, memo)
    found = copy.deepcopy(checkpoint, memo)
    expected = weight.clone()
    weight.zero_()
    torch.testing.assert_close(found["state_dict"]["a"], expected)
    assert found["state_dict"]["a"] is found["state_dict"]["b"]
    torch.testing.assert_close(found["rest"][0][0], expected[0])
    torch.testing.assert_close(found["rest"][0][1], expected.T)
    assert found["rest"][1] == {"n": 1}


def test_tensors_without_memory_of_their_own_are_not_taken_for_one_another() -> None:
    model = {
        "first": TwoTensor(torch.zeros(2), torch.ones(2)),
        "second": TwoTensor(torch.full((2,), 7.0), torch.full((2,), 8.0)),
        "sparse": torch.eye(3).to_sparse(),
        "plain": torch.nn.Parameter(torch.arange(2.0)),
    }
    memo: dict[int, Any] = {}
    copy_to_host(model, memo)
    copied = copy.deepcopy(model, memo)
    for name in ("first", "second"):
        assert type(copied[name]) is TwoTensor
        assert torch.equal(copied[name].a, model[name].a)
        assert torch.equal(copied[name].b, model[name].b)
        assert copied[name].a.data_ptr() != model[name].a.data_ptr()
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert memo[id(model["plain"])] is copied["plain"]
    assert copied["plain"].data_ptr() != model["plain"].data_ptr()


def _fit_and_validate_the_best(root: Path) -> list[float]:
    saver = ModelCheckpoint(dirpath=root, filename=f"by-process-{os.getpid()}")
    options = {"enable_checkpointing": True, "callbacks": [saver]}
    job = Job(num_batches=2, trainer=options)
    strategy = EntrainStrategy()
    module = job.module()
    trainer = job.make_trainer(strategy, 2, root)
    loader = job.loader(trainer, module)
    trainer.fit(module, loader)
    trainer.validate(module, loader, ckpt_path="best", verbose=False)
    return module.val_losses


def test_all_ranks_read_the_best_checkpoint_of_rank_0(tmp_path: Path) -> None:
    first, second = run_ranks(2, _fit_and_validate_the_best, tmp_path)
    assert first == second
    assert len(list(tmp_path.glob("by-process-*"))) == 1
