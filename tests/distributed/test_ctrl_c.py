"""Ctrl-C under `entrain-train`: the terminal sends it to every process of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_entrain.data.sampler import outlive_signals
from lightning_entrain.strategy import INTERRUPTED


class Numbers(Dataset[int]):
    """Items that take a moment."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def test_loader_workers_outlive_the_first_signals() -> None:
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1, worker_init_fn=outlive_signals)
    batches = iter(loader)
    found = [next(batches)]
    (worker,) = batches._workers  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
        found.append(next(batches))
    assert [*found, *batches] == list(range(12))
    again = iter(loader)
    next(again)
    (worker,) = again._workers  # type: ignore[attr-defined]
    # As torch ends a worker that is stuck; its handler for dead workers may raise.
    with suppress(RuntimeError):
        terminate_again_and_again(worker)
    worker.join(20)
    assert worker.exitcode == -signal.SIGTERM


def terminate_again_and_again(worker: Any) -> None:
    for _ in range(50):  # twice is enough, unless the second comes before the first is seen
        if not worker.is_alive():
            return
        os.kill(worker.pid, signal.SIGTERM)
        time.sleep(0.2)


def in_session(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own, *_ = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_ctrl_c_saves_and_ends_all_processes(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("entrain-train")
    options = ["experiment=quick", "data=synthetic", "data.num_workers=1", "trainer.devices=3"]
    options.append("trainer.max_steps=100000")
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(
            [command, *options, f"hydra.run.dir={tmp_path / 'run'}"],
            cwd=tmp_path,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LIGHTNING_ENTRAIN_CACHE": str(tmp_path / "cache")},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 100
        while "step 1/" not in output.read_text():
            assert job.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        while len(in_session(job.pid)) < 6:  # three ranks and their loaders, anew every epoch
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(20) == 128 + signal.SIGINT, output.read_text()
        deadline = time.monotonic() + 60  # a loader worker looks after its rank every 5 s
        while in_session(job.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    text = output.read_text()
    assert "Ctrl-C again ends them at once" in text
    assert "Traceback" not in text
    (saved,) = (tmp_path / "run").rglob(INTERRUPTED)
    step = torch.load(saved, weights_only=True)["global_step"]
    assert step > 0
    ending = text[text.index("Run stopped") :].splitlines()
    assert any(line.split() == ["steps", str(step), "on", "3", "process(es)"] for line in ending)
    assert ending[-1].split()[:2] == ["resume", "entrain-train"]
    assert ending[-1].endswith(" hydra.run.dir=run ckpt_path=run/checkpoints/interrupted.ckpt")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_while_starting_is_one_line(tmp_path: Path) -> None:
    # Python drops an interrupt that meets a destructor or a callback of an import: then once more.
    for attempt in range(5):
        text, code = interrupted_start(tmp_path / str(attempt))
        if text.split() == ["Interrupted"]:
            break
    assert text.split() == ["Interrupted"]
    assert code == 128 + signal.SIGINT


def interrupted_start(folder: Path) -> tuple[str, int]:
    """Output and exit code of a run that is interrupted before it trains."""
    command = Path(sys.executable).with_name("entrain-train")
    folder.mkdir()
    job = subprocess.Popen(
        [command, "experiment=quick", "data=synthetic", f"hydra.run.dir={folder / 'run'}"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not (folder / "run" / ".entrain.lock").exists():  # torch is imported now
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)
    text, _ = job.communicate(timeout=100)
    return text, job.returncode
