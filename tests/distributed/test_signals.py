"""Requests to stop, and what forked children have to do with them: nothing."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_entrain.runtime.signals import INTERRUPT, STOP, StopRequest
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import Ranks, run_ranks

GRACE_SECONDS = 0.5


def _terminate_a_child() -> tuple[int, int, bool]:
    request = StopRequest(GRACE_SECONDS)
    request.install()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    time.sleep(4 * GRACE_SECONDS)
    gone, status = os.waitpid(child, os.WNOHANG)
    if not gone:
        os.kill(child, signal.SIGKILL)
    kind, heeded = request.kind, signal.getsignal(signal.SIGTERM) == request._handle
    request.remove()
    return kind, os.WTERMSIG(status) if gone else 0, heeded


def test_a_signal_to_a_forked_child_ends_the_child_alone() -> None:
    assert run_ranks(1, _terminate_a_child) == [(0, signal.SIGTERM, True)]


def _grace_period_of_a_blocked_rank() -> None:
    request = StopRequest(GRACE_SECONDS, on_forced_end=lambda text: print(text, flush=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1100 if hard == resource.RLIM_INFINITY else min(1100, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(wanted - 40)]
    request.install()
    assert request._pipe is not None
    assert min(request._pipe) > 1023 or wanted < 1100, len(held)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def test_a_rank_with_many_open_files_ends_after_its_grace_period(
    capfd: pytest.CaptureFixture,
) -> None:
    assert Ranks(1, _grace_period_of_a_blocked_rank).outcomes(15) == [("ended", 143)]
    said = capfd.readouterr()
    assert said.out.startswith("did not finish its step within 0.5 s")


def test_which_signals_are_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    request = StopRequest(60.0)
    monkeypatch.setattr(request, "_end", lambda kind, text: ended.append(kind))
    first: dict[int, float] = {}
    for kind, now in ((INTERRUPT, 0.0), (INTERRUPT, 0.9), (STOP, 1.5), (STOP, 4.4)):
        request._count(kind, first, now)
    assert not ended, "a terminal and torchrun pass the first one on"
    request._count(INTERRUPT, first, 1.1)
    request._count(STOP, first, 4.6)
    assert ended == [INTERRUPT, STOP]


class AskedAtTheEnd(Module):
    """A signal arrives when no step is left, and then the last checkpoint takes long to write."""

    def on_train_end(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def on_fit_end(self) -> None:
        raise AssertionError("the run was to end")


class AskedAtTheEndJob(Job):
    def module(self) -> Module:
        return AskedAtTheEnd(super().module().model, self)


def _fit_slowly_written(devices: int, root: Path) -> tuple[Any, bool]:
    strategy = EntrainStrategy(stop_seconds=GRACE_SECONDS, async_checkpoint=True)
    close = strategy._queue.close

    def slow() -> Exception | None:
        time.sleep(3 * GRACE_SECONDS)
        return close()

    strategy._queue.close = slow  # type: ignore[method-assign]
    code: Any = None
    try:
        AskedAtTheEndJob(num_batches=2).fit(strategy, devices, root)
    except SystemExit as end:
        code = end.code
    return code, signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("devices", [1, 2])
def test_a_request_after_the_last_step_is_not_lost(devices: int, tmp_path: Path) -> None:
    found = run_ranks(devices, _fit_slowly_written, devices, tmp_path)
    assert found == [(128 + signal.SIGINT, True)] * devices
