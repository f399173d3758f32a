"""One rank fails: every rank ends soon, and says which one was first and why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_entrain.strategy import INTERRUPTED, EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import Ranks

LIMIT_SECONDS = 20


class Failing(Module):
    """Fails on one rank at one step, in one of several ways."""

    rank = 0
    step = 2
    how = "raise"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.rank and batch_idx == self.step:
            if self.how == "raise":
                raise ValueError(f"planted on rank {self.rank}")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if self.how == "hang":
                time.sleep(1000)
            if self.how == "hang in a layer":
                layer = self.model.llm.model.layers[0]
                layer.register_forward_pre_hook(lambda *args: time.sleep(1000))
        return super().training_step(batch, batch_idx)


class FailingJob(Job):
    module_class = Failing
    how = "raise"
    rank = 0

    def module(self) -> Module:
        plain = super().module()
        module = Failing(plain.model, self)
        module.rank, module.how = self.rank, self.how
        return module


def fit(job: Job, options: dict[str, Any], devices: int, root: Path) -> None:
    job.fit(EntrainStrategy(**options), devices, root)


def end_together(job: Job, devices: int, options: dict[str, Any], root: Path) -> tuple[Any, str]:
    ranks = Ranks(devices, fit, job, options, devices, root)
    start = time.monotonic()
    outcomes = ranks.outcomes(timeout=LIMIT_SECONDS + 20)
    assert time.monotonic() - start < LIMIT_SECONDS + 10, "start-up takes a few seconds of this"
    assert all(process.exitcode not in (0, None) for process in ranks.processes), outcomes
    assert not any(kind == "hung" for kind, _ in outcomes), outcomes
    return outcomes, "\n".join(str(value) for _, value in outcomes)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_ends_all(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    job = FailingJob()
    job.rank = rank
    _, text = end_together(job, 3, {"llm_stages": 2}, tmp_path)
    text += capfd.readouterr().err
    assert f"ValueError: planted on rank {rank}" in text
    assert f"rank {rank} failed first: ValueError: planted on rank {rank}" in text


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_all(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    job = FailingJob()
    job.rank, job.how = rank, "kill"
    outcomes, text = end_together(job, 3, {"llm_stages": 2}, tmp_path)
    assert outcomes[rank] == ("ended", -signal.SIGKILL)
    if rank > 0:  # with rank 0 the store is gone in which ranks report
        assert f"rank {rank} no longer reports" in text + capfd.readouterr().err


class DisagreeingJob(Job):
    """Rank 1 sees other data than rank 0."""

    def fit(self, strategy: Any, devices: int, root: Path) -> Any:
        self.seed = int(os.environ["LOCAL_RANK"])
        return super().fit(strategy, devices, root)


def test_ranks_that_plan_differently_stop_before_anything_is_sent(tmp_path: Path) -> None:
    outcomes, _ = end_together(DisagreeingJob(), 2, {}, tmp_path)
    for _, text in outcomes:
        assert "RuntimeMismatchError: Rank 1 has another assignment of the global batch" in text


@pytest.mark.parametrize(("how", "where"), [("hang", "training_step"), ("hang in a layer", "1F0")])
def test_a_rank_that_hangs_is_named_and_ends_all(
    how: str, where: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    job = FailingJob()
    job.rank, job.how = 1, how
    outcomes, _ = end_together(job, 3, {"llm_stages": 2, "timeout_seconds": 8}, tmp_path)
    said = re.compile(
        rf"rank 1 has been in {where} for \d+ s[.;].*Waiting for (it|them), rank [02] "
        r"failed first: RuntimeError: .*[Tt]imed? ?out"
    )
    heard = [rank for rank, (_, text) in enumerate(outcomes) if said.search(str(text))]
    printed = capfd.readouterr().err
    assert heard, (outcomes, printed)
    for rank in {0, 2} - set(heard):
        assert re.search(rf"\[rank {rank}\] .*{said.pattern}", printed), (outcomes, printed)
    # The rank itself tells where in the code it stands.
    stack, _, _ = printed.partition("[rank 1] stands there")
    assert re.search(r'test_faults\.py", line \d+, in (training_step|<lambda>)', stack), printed


@pytest.mark.parametrize("rank", [0, 2])
def test_sigterm_on_any_rank_saves_and_leaves(rank: int, tmp_path: Path) -> None:
    job = FailingJob()
    job.rank, job.how = rank, "terminate"
    outcomes = Ranks(3, fit, job, {"llm_stages": 2}, 3, tmp_path).outcomes()
    assert [text.split(":")[0] for _, text in outcomes] == ["SIGTERMException"] * 3
    saved = torch.load(tmp_path / INTERRUPTED, weights_only=True)
    assert saved["global_step"] == Failing.step + 1

    whole = Job().fit(None, 1, tmp_path)
    rest = Job(ckpt_path=str(tmp_path / INTERRUPTED), skip_batches=Failing.step + 1)
    resumed = rest.fit(None, 1, tmp_path)
    assert resumed.losses == pytest.approx(whole.losses[Failing.step + 1 :], rel=1e-5)


def exit_code(*args: Any) -> Any:
    try:
        fit(*args)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize(("devices", "rank"), [(3, 0), (3, 2), (1, 0)])
def test_ctrl_c_on_any_rank_saves_where_that_is_wanted(
    devices: int, rank: int, tmp_path: Path
) -> None:
    for wanted in (True, False):
        root = tmp_path / str(wanted)
        job = FailingJob(trainer={"enable_checkpointing": wanted})
        job.rank, job.how = rank, "interrupt"
        options = {"llm_stages": 2} if devices > 1 else {}
        outcomes = Ranks(devices, exit_code, job, options, devices, root).outcomes()
        assert outcomes == [("result", 128 + signal.SIGINT)] * devices
        saved = list(root.rglob(INTERRUPTED))
        assert len(saved) == int(wanted)
        if saved:
            steps = torch.load(saved[0], weights_only=True)["global_step"]
            assert steps == Failing.step + 1


class Slow(Module):
    """Steps that last until someone has had enough."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            if self.global_rank == 0:
                (self.job.root / "there").touch()  # type: ignore[attr-defined]
            if self.global_rank == 1:
                time.sleep(1000)  # the others are blocked in native code
        return loss


class SlowJob(Job):
    root = Path()

    def module(self) -> Module:
        return Slow(super().module().model, self)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    job = SlowJob()
    job.root = tmp_path
    ranks = Ranks(3, fit, job, {"llm_stages": 2}, 3, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        time.sleep(0.1)
        assert all(process.is_alive() for process in ranks.processes)
        assert time.monotonic() < deadline
    for pause in (1.5, 0):  # which of two is a second one: test_signals.py
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGINT)
        time.sleep(pause)
    # Without the second, the one that sleeps would hold the others up for stop_seconds.
    assert ranks.outcomes(timeout=45) == [("ended", 128 + signal.SIGINT)] * 3
