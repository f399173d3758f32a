"""torchrun, SLURM and several nodes: who is where, and how a job is queued again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import Ranks, free_port, run_ranks

STEP = 2
JOB_ID = "4711"


def _become(kind: str, nodes: int, per_node: int) -> int:
    """Set the variables that a launcher would set; the harness numbered all ranks."""
    rank = int(os.environ["LOCAL_RANK"])
    node, local = divmod(rank, per_node)
    world_size = nodes * per_node
    variables = {
        "script": {"NODE_RANK": node, "LOCAL_RANK": local},
        "torchrun": {
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "RANK": rank,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": per_node,
        },
        "slurm": {
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_NTASKS": world_size,
            "SLURM_NTASKS_PER_NODE": per_node,
            "SLURM_NNODES": nodes,
            "SLURM_NODEID": node,
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": local,
        },
    }[kind]
    if kind == "slurm":
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
    os.environ.update({name: str(value) for name, value in variables.items()})
    return rank


class Asked(Module):
    """One rank receives a signal in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == STEP and self.global_rank == self.job.asked:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


class EnvironmentJob(Job):
    asked = -1

    def module(self) -> Module:
        return Asked(super().module().model, self)


def _fit(kind: str, nodes: int, per_node: int, job: Job, root: Path) -> dict[str, Any]:
    rank = _become(kind, nodes, per_node)
    strategy = EntrainStrategy(replicas=2)
    job.trainer = {**job.trainer, "num_nodes": nodes}
    outcome = job.fit(strategy, per_node, root)
    layout = strategy.layout
    return {
        "environment": type(strategy.cluster_environment),
        "ranks": (rank, strategy.global_rank, strategy.node_rank, strategy.local_rank),
        "world_size": strategy.world_size,
        "place": layout.split(strategy.global_rank),
        "losses": outcome.losses,
    }


@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        ("script", LightningEnvironment),
        ("torchrun", TorchElasticEnvironment),
        ("slurm", SLURMEnvironment),
    ],
)
def test_two_nodes_of_two_ranks(kind: str, environment: type, tmp_path: Path) -> None:
    job = Job(num_batches=2)
    one = job.fit(None, 1, tmp_path).losses
    for rank, found in enumerate(run_ranks(4, _fit, kind, 2, 2, job, tmp_path)):
        assert found["environment"] is environment
        assert found["ranks"] == (rank, rank, rank // 2, rank % 2)
        assert found["world_size"] == 4
        assert found["place"] == (rank // 2, rank % 2), "a replica's stages are on one node"
        assert found["losses"] == pytest.approx(one, rel=1e-5)


def test_slurm_queues_the_job_again_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    whole = Job().fit(None, 1, tmp_path / "whole").losses

    job = EnvironmentJob()
    job.asked = 3
    outcomes = Ranks(4, _fit, "slurm", 2, 2, job, tmp_path).outcomes()
    assert [kind for kind, _ in outcomes] == ["error"] * 4, outcomes
    assert all("SIGTERMException" in text for _, text in outcomes), outcomes
    assert calls.read_text().split("\n")[:-1] == [f"requeue {JOB_ID}"]
    (saved,) = tmp_path.glob("hpc_ckpt*")
    assert torch.load(saved, weights_only=True)["global_step"] == STEP + 1

    again = EnvironmentJob(skip_batches=STEP + 1)  # the requeued job is the same command
    for found in run_ranks(4, _fit, "slurm", 2, 2, again, tmp_path):
        assert found["losses"] == pytest.approx(whole[STEP + 1 :], rel=1e-5)


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("drill.py")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--max-restarts=1", f"--master-port={free_port()}", "--monitor-interval=0.2"),
        *("-m", "tests.distributed.drill", "once", "1", str(tmp_path)),
    ]
    done = subprocess.run(
        command, cwd=script.parents[2], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith(("step", "finished"))]
    assert steps == [*(f"step {n}" for n in (0, 1, 2, 2, 3, 4, 5)), "finished after 6 steps"]
