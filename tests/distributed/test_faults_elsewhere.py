"""Failures outside the training step, and under the real launcher, end the job as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.drill import main
from tests.distributed.ranks import Ranks

LIMIT_SECONDS = 20


@pytest.mark.parametrize(
    ("mode", "rank", "error"),
    [
        ("setup", 1, "ValueError: planted in setup on rank 1"),
        ("optimizers", 0, "ValueError: planted in optimizers on rank 0"),
        ("validation", 1, "ValueError: planted in validation on rank 1"),
        ("checkpoint", 0, "ValueError: planted in checkpoint on rank 0"),
        ("loader", 1, "OSError: Caught OSError in DataLoader worker process 0"),
    ],
)
def test_a_failure_outside_the_step(
    mode: str, rank: int, error: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    start = time.monotonic()
    outcomes = Ranks(2, main, mode, rank, tmp_path).outcomes(timeout=2 * LIMIT_SECONDS)
    assert time.monotonic() - start < LIMIT_SECONDS + 10, "start-up takes a few seconds of this"
    assert not any(kind in ("hung", "result") for kind, _ in outcomes), outcomes
    assert error in str(outcomes[rank][1])
    other = f"{outcomes[1 - rank][1]}\n{capfd.readouterr().err}"
    assert f"rank {rank} failed first: {error}" in other


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_launched_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.drill", "endless", "0", str(tmp_path)]
    output = tmp_path / "output"
    with output.open("w") as file:
        launcher = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: "step 2" in output.read_text(), 90)
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        assert pids[0] == launcher.pid
        os.kill(pids[1], signal.SIGKILL)
        assert launcher.wait(LIMIT_SECONDS) == 1
        wait_for(lambda: not any(map(is_running, pids)), 5)
    finally:
        launcher.kill()
    assert "rank 1 failed first: its process was ended by SIGKILL" in output.read_text()
