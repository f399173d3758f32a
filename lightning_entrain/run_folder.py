"""The folder of a run: made before anything is written, and held by one run at a time."""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_entrain.errors import ConfigError, EntrainError
from lightning_entrain.job_ranks import is_launching

LOCK_NAME = ".entrain.lock"
"""File in a run's folder that says who writes there; removed at the end of the run."""

_NO_HANDLE = -1
_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)


@contextmanager
def run_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a run's folder and keep other runs out of it meanwhile.

    Within one process it may be entered again. Ranks other than the first enter freely: the folder
    is their job's.

    Args:
        path: The folder.

    Raises:
        ConfigError: If it cannot be made or written, or another run holds it.
    """
    folder = Path(path).expanduser()
    if not is_launching():
        yield folder
        return
    hold(folder)
    try:
        yield folder
    finally:
        release(folder)


class RunFolderCallback(Callback):
    """Holds Hydra's output folder, from before Hydra writes to it until the process ends."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hold the folder of a single run."""
        _hold_or_exit(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hold the folder of a sweep."""
        _hold_or_exit(config.hydra.sweep.dir)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how the jobs of a sweep are compared."""
        folder = Path(config.hydra.sweep.dir)
        reports = list(folder.expanduser().glob("*/run_record.json"))
        if is_launching() and len(reports) > 1:
            command = shlex.join(["entrain-report", str(folder)])
            print(f"\nCompare the {len(reports)} runs: {command}", flush=True)


def _hold_or_exit(folder: str) -> None:
    if not is_launching():
        return
    try:
        hold(Path(folder).expanduser())
    except EntrainError as error:  # Hydra would turn it into a warning
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


_held: dict[Path, tuple[int, int]] = {}  # folder: (file descriptor, times held)


def hold(folder: Path) -> None:
    """Make the folder and lock it for this process; see :func:`run_folder`.

    The operating system gives the lock up when its process ends, however it ends, so that the
    lock file of a killed run is no obstacle.

    Raises:
        ConfigError: If the folder cannot be made or written, or another run holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        if folder in _held:
            handle, times = _held[folder]
            _held[folder] = handle, times + 1
            return
        handle = _locked(folder / LOCK_NAME)
    except OSError as error:
        if isinstance(error, EntrainError):
            raise
        raise ConfigError(
            f"The run's folder {folder} cannot be written: {error.strerror or error}",
            limit="a folder, or a path where one can be made",
            remedy="set hydra.run.dir=DIR to another",
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(_own_record()).encode())
    _held[folder] = handle, 1
    atexit.register(_release_at_exit, folder, os.getpid())


def release(folder: Path) -> None:
    """Let go of a folder as often as it was held; then its lock file is removed."""
    folder = folder.resolve()
    handle, times = _held.pop(folder)
    if times > 1:
        _held[folder] = handle, times - 1
        return
    if handle == _NO_HANDLE:  # the parent's
        return
    with suppress(OSError):  # the folder may be gone
        (folder / LOCK_NAME).unlink()
    os.close(handle)


def _release_at_exit(folder: Path, pid: int) -> None:
    if os.getpid() != pid or folder not in _held:  # a forked child holds nothing
        return
    _held[folder] = _held[folder][0], 1
    release(folder)


def _locked(path: Path) -> int:
    """An open, locked file; it stays locked until it is closed or the process ends.

    Raises:
        ConfigError: If another process has it.
        OSError: If it cannot be opened.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as error:
            record = _record(handle)
            os.close(handle)
            if error.errno in _HELD_ELSEWHERE or _is_running(record):
                raise _held_error(path, record) from error
            # The file system knows no locks: what the file says has to do.
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                return handle
        os.close(handle)  # removed by its former holder between the two calls


def _lock(handle: int) -> None:
    """Lock a file, or raise OSError.

    The system's own record locks (`lockf`) would end as soon as this process closes any handle of
    the file, such as one that copies the folder.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            raise
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_child() -> None:
    """A forked child would keep the folder locked after its parent has been killed."""
    for folder, (handle, times) in _held.items():
        if handle != _NO_HANDLE:
            os.close(handle)
        _held[folder] = _NO_HANDLE, times


os.register_at_fork(after_in_child=_close_in_child)


def _own_record() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started}


def _record(handle: int) -> dict[str, Any]:
    try:
        record = json.loads(os.read(handle, 4096))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_running(record: Mapping[str, Any]) -> bool:
    """Whether the process of a lock file may still run: on another host nobody knows."""
    if not record:
        return False
    if record.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(record["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _held_error(path: Path, record: Mapping[str, Any]) -> ConfigError:
    who = "another run"
    if record:
        who = (
            f"the run of process {record.get('pid')} on {record.get('host')}, started "
            f"{record.get('started')}"
        )
    return ConfigError(
        f"The run's folder {path.parent} is in use by {who}",
        limit="one run per folder, for runs would overwrite each other's files",
        remedy=f"wait for it or end it, or set hydra.run.dir=DIR to another; if no such process "
        f"exists, delete {path}",
    )
