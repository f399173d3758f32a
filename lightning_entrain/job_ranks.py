"""What launchers tell a process of its job before the ranks are connected."""

from __future__ import annotations

import os
from collections.abc import Mapping

_GLOBAL_RANKS = (
    "RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
)
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)
_NODES = ("NODE_RANK", "GROUP_RANK")
_JOBS = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("LSB_JOBID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT"),
)


def is_launching(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of its job, which acts for all of them.

    Known are torchrun, SLURM, LSF, Open MPI, MPICH, Intel MPI and Lightning's own variables.
    """
    names = (*_GLOBAL_RANKS, *_LOCAL_RANKS, *_NODES)
    return all(environment.get(name, "0") == "0" for name in names)


def is_first_on_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of its job on its machine."""
    for name in (*_LOCAL_RANKS, *_GLOBAL_RANKS):
        if name in environment:
            return environment[name] == "0"
    return True


def rank_in_job(environment: Mapping[str, str] = os.environ) -> int:
    """The global rank as far as it is known, for messages; 0 if none is."""
    for name in (*_GLOBAL_RANKS, *_LOCAL_RANKS):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """Text that all processes of a job share, and no job before it; empty if none is known."""
    return "/".join(environment[name] for name in _JOBS if environment.get(name))
