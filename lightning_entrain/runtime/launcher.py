"""Starts the ranks of one node, and ends them together."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_entrain.errors import ConfigError
from lightning_entrain.runtime.multirun import in_sweep, start_ranks
from lightning_entrain.runtime.signals import EXIT_CODES

_GRACE_SECONDS = 8.0
_ORDERLY_SECONDS = 60.0
_ORDERLY = (0, *EXIT_CODES.values())
_PARENT = "ENTRAIN_LAUNCHER_PID"


def check_not_interactive(environment: ClusterEnvironment, world_size: int) -> None:
    """Refuse to start processes from an interactive session.

    Raises:
        ConfigError: If the session is one and no other program starts the processes.
    """
    if _IS_INTERACTIVE and not environment.creates_processes_externally:
        raise ConfigError(
            f"{world_size} processes from an interactive session",
            limit="each rank runs the script again, and a session has none; ranks that are forked "
            "or spawned would lose all stages but the first at the end",
            remedy="write the code to a file and run `python file.py` or `torchrun file.py`, or "
            "set devices=1, which runs all stages here",
        )


class EntrainLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher with a check before and an end in common after.

    Args:
        cluster_environment: Tells whether processes are started from outside (torchrun, SLURM).
        num_processes: Ranks on this node.
        num_nodes: Nodes of the job.
        preflight: Called with the LightningModule before any process is started, so that a wrong
            layout is one clear error and not one per rank.

    Attributes:
        on_child_failure: Called with the local rank and a description when a rank of this node
            ended badly.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        preflight: Callable[[Any], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._preflight = preflight
        self.on_child_failure: Callable[[int, str], None] | None = None
        self.orderly = False  # whether the last run ended well: then the others may take longer

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether other programs start the processes; see :func:`check_not_interactive`."""
        return self.cluster_environment.creates_processes_externally

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check the model, start the other ranks of this node, run ``function`` on all."""
        if args:
            self._preflight(args[0])
        external = self.cluster_environment.creates_processes_externally
        if not external:
            self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
            if not self.procs and self.num_processes > 1:
                os.environ[_PARENT] = str(os.getpid())
                # Warnings with C++ frames would bury the first error when rank 0's store is gone.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                self._call_children_scripts()
                atexit.register(self.end_children)
                _ChildWatch(self).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        if not in_sweep():
            super()._call_children_scripts()
            return
        self._check_can_spawn_children()
        self.procs = start_ranks(self.cluster_environment, self.num_processes, self.num_nodes)

    def end_children(self) -> None:
        """Wait for the other ranks of this node; terminate those that stay."""
        grace_seconds = _ORDERLY_SECONDS if self.orderly else _GRACE_SECONDS
        deadline = time.monotonic() + grace_seconds
        for process in self.procs:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.terminate()
        for process in self.procs:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _ChildWatch(threading.Thread):
    """Ends this process when one of its children failed and the rank does not notice by itself."""

    def __init__(self, launcher: EntrainLauncher) -> None:
        super().__init__(daemon=True, name="entrain-children")
        self._launcher = launcher

    def run(self) -> None:
        processes = self._launcher.procs
        while True:
            codes = [process.poll() for process in processes]
            if all(code in _ORDERLY for code in codes):
                return
            failed = [rank for rank, code in enumerate(codes, 1) if code not in (None, *_ORDERLY)]
            if failed:
                break
            time.sleep(0.5)
        rank = failed[0]
        ending = describe_exit(codes[rank - 1] or 0)
        if self._launcher.on_child_failure is not None:
            self._launcher.on_child_failure(rank, ending)
        time.sleep(_GRACE_SECONDS)
        print(
            f"[rank 0] ending because the process of rank {rank} of this node {ending}",
            file=sys.stderr,
            flush=True,
        )
        for process in processes:
            if process.poll() is None:
                process.kill()
        os._exit(1)  # the main thread is stuck: it had its grace period


def describe_exit(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def die_with_parent() -> None:
    """Let a rank started by :class:`EntrainLauncher` end when its launcher dies."""
    parent = os.environ.get(_PARENT)
    if parent is None or os.environ.get("LOCAL_RANK", "0") == "0":
        return
    if sys.platform.startswith("linux"):
        import ctypes

        parent_death_signal = 1
        # SIGKILL: Lightning handles SIGTERM by finishing the batch, which may wait for dead ranks.
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)
