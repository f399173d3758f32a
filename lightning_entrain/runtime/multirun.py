"""Several jobs in one Hydra sweep: each starts its own ranks, and ends them before the next."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

_JOB_VARIABLES = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GLOBAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ENTRAIN_LAUNCHER_PID",
)
_CONFIG_FLAGS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


def under_hydra() -> bool:
    """Whether this process runs a Hydra job, as `entrain-train` does."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    return hydra is not None and bool(hydra.HydraConfig.initialized())


def in_sweep() -> bool:
    """Whether this process runs one job of a Hydra multirun (`-m`)."""
    if not under_hydra():
        return False
    hydra = sys.modules["hydra.core.hydra_config"]
    return str(hydra.HydraConfig.get().mode).endswith("MULTIRUN")


def sweep_name() -> str | None:
    """A name that all jobs of this sweep share; None outside one."""
    if not in_sweep():
        return None
    from hydra.core.hydra_config import HydraConfig

    return "-".join(Path(HydraConfig.get().sweep.dir).parts[-2:])


def job_name() -> str | None:
    """What sets this job of the sweep apart, such as `assignment=fixed`; None outside one."""
    if not in_sweep():
        return None
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get()
    # What was given as it is now is the same in all jobs; Hydra completes deletions (~key).
    given = {*sys.argv, *(f"{argument}=null" for argument in sys.argv)}
    own = [override for override in config.overrides.task if override not in given]
    return ",".join(own) or str(config.job.override_dirname or config.job.num)


def replay_command(local_rank: int) -> tuple[list[str], str]:
    """Command and folder of another rank of this job.

    The rank replays this job alone: with the sweep's arguments it would run the whole sweep, and
    a sweeper that draws values would draw others.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import to_absolute_path

    import __main__

    config = HydraConfig.get()
    spec = getattr(__main__, "__spec__", None)
    program = [to_absolute_path(sys.argv[0])] if spec is None else ["-m", spec.name]
    kept = [o for o in config.overrides.hydra if not o.lstrip("+").startswith(_REPLACED)]
    folder = str(config.runtime.output_dir).replace('"', '\\"')
    return (
        [
            sys.executable,
            *program,
            *_config_flags(sys.argv[1:]),
            *config.overrides.task,
            *kept,
            "hydra.mode=RUN",
            f'hydra.run.dir="{folder}"',
            f"hydra.job.name=train_rank_{local_rank}",
            "hydra.output_subdir=null",
        ],
        str(config.runtime.cwd),
    )


_REPLACED = ("hydra.mode", "hydra.run.dir", "hydra.job.name", "hydra.output_subdir", "hydra.sweep")


def start_ranks(
    environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> list[subprocess.Popen]:
    """Start the other ranks of this node for one job of a sweep."""
    os.environ.update(
        MASTER_ADDR=environment.main_address,
        MASTER_PORT=str(environment.main_port),
        NODE_RANK=str(environment.node_rank()),
        LOCAL_RANK=str(environment.local_rank()),
        WORLD_SIZE=str(num_processes * num_nodes),
    )
    started = []
    for local_rank in range(1, num_processes):
        command, folder = replay_command(local_rank)
        ranks = {**os.environ, "LOCAL_RANK": str(local_rank)}
        started.append(subprocess.Popen(command, env=ranks, cwd=folder))
    return started


def end_job(trainer: Any) -> None:
    """Leave nothing of a finished job behind that the sweep's next one would trip over.

    The other ranks end first, for rank 0 holds the store that they are connected to.
    """
    strategy = trainer.strategy
    launcher: Any = getattr(strategy, "_launcher", None)
    if getattr(launcher, "procs", None):
        launcher.end_children()
        atexit.unregister(launcher.end_children)
    watch = getattr(strategy, "_watch", None)
    if watch is not None:
        watch.stop()
        atexit.unregister(watch.stop)
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in _JOB_VARIABLES:
        os.environ.pop(name, None)


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """Which config file to compose; the other arguments belong to the sweep."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _CONFIG_FLAGS:
            kept += [argument, next(rest, "")]
        elif argument.startswith(tuple(f"{flag}=" for flag in _CONFIG_FLAGS)):
            kept.append(argument)
    return kept
