"""One run at a time in a folder, also after a run was killed."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from lightning_entrain import run_folder as module
from lightning_entrain.errors import ConfigError
from lightning_entrain.job_ranks import is_first_on_node, is_launching, rank_in_job
from lightning_entrain.run_folder import LOCK_NAME, run_folder

HOLD = """
import sys, time
from lightning_entrain.run_folder import run_folder
with run_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_is_held_until_its_process_ends_even_by_a_kill(holder, tmp_path):
    with pytest.raises(ConfigError) as caught, run_folder(tmp_path / "run"):
        pass
    assert f"of process {holder.pid} on {socket.gethostname()}" in str(caught.value)
    assert "Remedy: wait for it" in str(caught.value)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK_NAME).exists()
    with run_folder(tmp_path / "run"):
        record = json.loads((tmp_path / "run" / LOCK_NAME).read_text())
        assert record["pid"] == os.getpid()
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_one_process_may_enter_again(tmp_path):
    with run_folder(tmp_path):
        with run_folder(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
    assert not (tmp_path / LOCK_NAME).exists()


READ = """
import pathlib, sys, time
from lightning_entrain.run_folder import LOCK_NAME, run_folder
with run_folder(sys.argv[1]) as folder:
    (folder / LOCK_NAME).read_text()
    print("read", flush=True)
    sys.stdin.readline()
    import os
    if os.fork() == 0:
        print("forked", flush=True)
        time.sleep(20)
        os._exit(0)
    time.sleep(20)
"""


def test_reading_the_lock_file_and_forking_change_nothing(tmp_path):
    command = [sys.executable, "-c", READ, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    try:
        assert process.stdout.readline() == "read\n"
        with pytest.raises(ConfigError, match="in use"), run_folder(tmp_path):
            pass
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        process.kill()
        process.wait()
        with run_folder(tmp_path):  # the child lives on
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_other_ranks_enter_the_folder_of_their_job(holder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with run_folder(tmp_path / "run") as folder:
        assert folder == tmp_path / "run"


@pytest.mark.parametrize(
    ("environment", "first_of_job", "first_on_node", "rank"),
    [
        ({}, True, True, 0),
        ({"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, True, True, 0),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False, True, 4),
        ({"NODE_RANK": "1"}, False, True, 0),
        ({"NODE_RANK": "1", "LOCAL_RANK": "1"}, False, False, 1),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, False, False, 3),
        ({"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}, False, True, 2),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, False, 3),
        ({"PMI_RANK": "1"}, False, False, 1),
        ({"PMIX_RANK": "0"}, True, True, 0),
    ],
)
def test_who_acts_for_the_job_and_who_for_the_machine(
    environment, first_of_job, first_on_node, rank
):
    assert is_launching(environment) is first_of_job
    assert is_first_on_node(environment) is first_on_node
    assert rank_in_job(environment) == rank


def test_without_locks_of_the_file_system_the_record_decides(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    monkeypatch.setattr(module.fcntl, "lockf", refuse)
    lock = tmp_path / LOCK_NAME
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    with run_folder(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(ConfigError, match="in use"), run_folder(tmp_path):
        pass
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(ConfigError, match=r"on elsewhere.*delete"), run_folder(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/nowhere/run"])
def test_a_folder_that_cannot_be_made_is_named(name, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"cannot be written: .*Remedy: "),
        run_folder(tmp_path / name),
    ):
        pass
