"""When one rank fails: tell the others which one and why, and leave together."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.5
_HEARSAY_SECONDS = 3.0
_CONNECTION_WORDS = ("gloo", "nccl", "connection", "timed out", "process group", "store")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error tells only that some other rank is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _CONNECTION_WORDS)


class FaultWatch:
    """Watches for the first error of any rank, from a thread of its own.

    A rank blocked in a collective cannot be woken from Python. So after an error the thread gives
    the rank a grace period to fail by itself, then prints the first rank's error and ends the
    process.

    Args:
        rank: This rank.
        host: Address of the job's key-value store.
        port: Its port.
        grace_seconds: How long a rank may take to fail by itself.

    Attributes:
        orderly: Whether the last run ended well, so that other ranks may leave.
        reported: Whether this rank has failed.
    """

    def __init__(self, rank: int, host: str, port: int, *, grace_seconds: float = 5.0) -> None:
        self._rank = rank
        self._grace_seconds = grace_seconds
        # A second connection: the default store's client blocks while a group is created.
        self._store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._key = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/entrain/first_error"
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._own_traceback = ""
        self.orderly = False
        self.reported = False
        self._first: tuple[int | None, str] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="entrain-faults")

    def start(self) -> None:
        """Begin to watch."""
        # A thread inside the store's client while Python ends would abort the process.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, at the end of a job that went well."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def report(self, error: BaseException) -> None:
        """Publish this rank's error unless another rank was first; later calls do nothing.

        A lost connection follows from what happened on another rank, which is given time to tell.
        """
        if self.reported:
            return
        self.reported = True
        if is_lost_connection(error):
            self._listen(_HEARSAY_SECONDS)
        else:
            self._own_traceback = "".join(traceback.format_exception(error))
        notes = "; ".join(getattr(error, "__notes__", []))
        message = str(error).split("\nException raised from", 1)[0]  # C++ frames follow
        text = f"{type(error).__name__}: {message}" + (f" ({notes})" if notes else "")
        self.publish(self._rank, text)
        if self._rank == 0:  # the store usually ends with rank 0: let the others read it first
            time.sleep(2 * _POLL_SECONDS)

    def publish(self, rank: int, text: str) -> None:
        """Make this the job's first error, unless there is one.

        Args:
            rank: The rank that failed.
            text: What happened to it.
        """
        record = json.dumps({"rank": rank, "error": text})
        # A RuntimeError here means that the store died with rank 0, which every rank notices.
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key, "", record)

    def _listen(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.first_error() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)

    def first_error(self) -> tuple[int | None, str] | None:
        """Rank and text of the first error of the job, if there was one."""
        if self._first is None:
            try:
                with self._lock:
                    if self._store.check([self._key]):
                        record = json.loads(self._store.get(self._key))
                        text = f"rank {record['rank']} failed first: {record['error']}"
                        self._first = record["rank"], text
            except RuntimeError:
                text = "the job's key-value store is gone: rank 0 or its launcher has ended"
                self._first = None, text
        return self._first

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            first = self.first_error()
            if first is None:
                continue
            if first[0] is None and self.orderly:
                return  # rank 0 has finished, this rank may still have work of its own
            grace = self._grace_seconds * (2 if self.reported else 1)
            if self._done.wait(grace):
                return
            print(
                f"{self._own_traceback}[rank {self._rank}] ending because {first[1]}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
