"""A Hydra sweep whose jobs have several processes: comparable runs, grouped, nothing left over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_entrain.observe.run_files import read_record
from lightning_entrain.observe.wandb_file import read_wandb_file

COMMAND = str(Path(sys.executable).with_name("entrain-train"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep_over_policies_trains_the_same_samples_in_each_job(tmp_path):
    environment = {
        **os.environ,
        "LIGHTNING_ENTRAIN_CACHE": str(tmp_path / "cache"),
        "NETRC": str(tmp_path / "none"),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR"):
        environment.pop(name, None)
    done = subprocess.run(
        [
            COMMAND,
            "-m",
            "assignment=fixed,joint",
            "experiment=quick",
            "data=synthetic",
            "trainer.max_steps=2",
            "trainer.devices=2",
            "~callbacks.checkpoint",
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\nCompare the 2 runs: entrain-report {tmp_path / 'sweep'}\n")
    assert done.stdout.count("Run finished") == 2  # each rank ran its own job alone
    files = [
        read_wandb_file(path)
        for job in ("0", "1")
        for path in (tmp_path / "sweep" / job).glob("wandb/offline-run-*/*.wandb")
    ]
    assert [file.name for file in files] == ["assignment=fixed", "assignment=joint"]
    assert {file.group for file in files} == {f"{tmp_path.name}-sweep"}
    records = [read_record(tmp_path / "sweep" / job / "run_record.json") for job in ("0", "1")]
    assert [record.policy for record in records] == ["fixed", "joint"]
    assert [record.environment["processes"] for record in records] == ["2", "2"]
    first, second = (dict(record.series["train/loss"]) for record in records)
    assert first == pytest.approx(second, rel=1e-4)  # the same samples, grouped otherwise
    assert still_running(str(tmp_path)) == []


def still_running(folder):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            place = os.readlink(process / "cwd")
        except OSError:
            continue
        if "entrain-train" in line and (folder in line or folder in place):
            found.append(line)
    return found
