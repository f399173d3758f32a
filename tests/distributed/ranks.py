"""Ranks as forked workers: about a second where a launched script takes twenty."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(
    rank: int, world_size: int, port: int, pipe: Any, function: Callable, args: Any
) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("result", function(*args)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)
    os._exit(0)  # no atexit handlers of the parent


class Ranks:
    """Processes of a job, for tests that watch them end."""

    def __init__(self, world_size: int, function: Callable, *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.pipes = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(rank, world_size, port, theirs, function, args)
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, timeout: float = 60.0) -> list[tuple[str, Any]]:
        """("result", value), ("error", text) or ("ended", exit code) per rank."""
        deadline = time.monotonic() + timeout
        found: list[tuple[str, Any]] = []
        try:
            for pipe, process in zip(self.pipes, self.processes, strict=True):
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    found.append(("hung", None))
                    continue
                try:
                    found.append(pipe.recv())
                except EOFError:
                    process.join(5)
                    found.append(("ended", process.exitcode))
            for process in self.processes:
                process.join(max(deadline - time.monotonic(), 0.1))
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return found


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Results of ``function`` on every rank; raises the first rank's error."""
    outcomes = Ranks(world_size, function, *args).outcomes(timeout)
    for rank, (kind, value) in enumerate(outcomes):
        if kind != "result":
            raise AssertionError(f"rank {rank} {kind}: {value}")
    return [value for _, value in outcomes]
