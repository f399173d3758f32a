"""When one rank fails: tell the others which one and why, and leave together."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_entrain.runtime.activity import Activity, Report, in_words, suspects

_POLL_SECONDS = 0.5
_HEARSAY_SECONDS = 3.0
_NUM_FRAMES = 12
_CONNECTION = re.compile(
    r"\b(gloo|nccl|tcpstore|processgroup\w*|process group|broken pipe|timed out (after|waiting)"
    r"|connection (closed by peer|reset by peer|refused))\b",
    re.IGNORECASE,
)
_TIME_OUT = re.compile(r"\b(timed ?out|time-?out)\b", re.IGNORECASE)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error tells only that some other rank is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _CONNECTION.search(str(error)) is not None


@dataclass(frozen=True, kw_only=True)
class FirstError:
    """The first error of a job.

    Attributes:
        rank: The rank that told it; None if that can no longer be known.
        text: It, in words.
        hanging: Ranks that stood still, where the error is that others waited for them too long.
    """

    rank: int | None
    text: str
    hanging: tuple[int, ...] = ()


class FaultWatch:
    """Watches for the first error of any rank, from a thread of its own.

    A rank blocked in a collective cannot be woken from Python. So after an error the thread gives
    the rank a grace period to fail by itself, then prints the first rank's error and ends the
    process. The thread also tells the others what this rank is doing, so that those who wait too
    long can name the rank that hangs.

    Args:
        rank: This rank.
        world_size: Ranks of the job.
        activity: What this rank is doing.
        host: Address of the job's key-value store.
        port: Its port.
        grace_seconds: How long a rank may take to fail by itself.

    Attributes:
        orderly: Whether the last run ended well, so that other ranks may leave.
        reported: Whether this rank has failed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        activity: Activity,
        host: str,
        port: int,
        *,
        grace_seconds: float = 5.0,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._activity = activity
        self._grace_seconds = grace_seconds
        # A second connection: the default store's client blocks while a group is created.
        self._store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._prefix = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/entrain"
        self._key = f"{self._prefix}/first_error"
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._own_traceback = ""
        self.orderly = False
        self.reported = False
        self._first: FirstError | None = None
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
        standing: list[tuple[int, str]] = []
        if is_lost_connection(error):
            standing = self._find_suspects(timed_out=_TIME_OUT.search(str(error)) is not None)
        else:
            self._own_traceback = "".join(traceback.format_exception(error))
        notes = "; ".join(getattr(error, "__notes__", []))
        message = str(error).split("\nException raised from", 1)[0]  # C++ frames follow
        text = f"{type(error).__name__}: {message}" + (f" ({notes})" if notes else "")
        self.publish(self._rank, text, standing)
        if self._rank == 0:  # the store usually ends with rank 0: let the others read it first
            time.sleep(2 * _POLL_SECONDS)

    def publish(self, rank: int, text: str, standing: list[tuple[int, str]] | None = None) -> None:
        """Make this the job's first error, unless there is one.

        Args:
            rank: The rank that failed.
            text: What happened to it.
            standing: Ranks that stand still, and where, if it failed by waiting for them.
        """
        text = f"rank {rank} failed first: {text}"
        if standing:
            them = "it" if len(standing) == 1 else "them"
            text = f"{in_words(standing)}. Waiting for {them}, {text}"
        hanging = [other for other, _ in standing or ()]
        record = json.dumps({"rank": rank, "text": text, "hanging": hanging})
        # A RuntimeError here means that the store died with rank 0, which every rank notices.
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key, "", record)

    def _listen(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.first_error() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)

    def _find_suspects(self, *, timed_out: bool) -> list[tuple[int, str]]:
        """Listen for the first error; if there is none, see which ranks are silent or stand still.

        One rank looks for all: with many ranks, the store could not answer each about every other.
        """
        if not self._looks_for_all():
            self._listen(3 * _HEARSAY_SECONDS)
            return []
        before, begin = self._reports(), time.monotonic()
        self._listen(_HEARSAY_SECONDS)
        if self.first_error() is not None:
            return []
        between = time.monotonic() - begin
        longer_than = _HEARSAY_SECONDS if timed_out else None
        return suspects(before, self._reports(), between, longer_than=longer_than)

    def _looks_for_all(self) -> bool:
        with self._lock, contextlib.suppress(RuntimeError):
            own = str(self._rank)
            return self._store.compare_set(f"{self._prefix}/looks", "", own) == own.encode()
        return False

    def _reports(self) -> dict[int, Report]:
        """What the other ranks last said of themselves."""
        found: dict[int, Report] = {}
        ranks = [rank for rank in range(self._world_size) if rank != self._rank]
        with self._lock, contextlib.suppress(RuntimeError):
            self._read(ranks, found)
        return found

    def _read(self, ranks: Sequence[int], found: dict[int, Report]) -> None:
        """All at once; in halves where one has said nothing yet, whose record cannot be read."""
        keys = [f"{self._prefix}/activity/{rank}" for rank in ranks]
        if not keys:
            return
        if self._store.check(keys):
            for rank, record in zip(ranks, self._store.multi_get(keys), strict=True):
                found[rank] = Report.from_dict(json.loads(record))
        elif len(ranks) > 1:
            half = len(ranks) // 2
            self._read(ranks[:half], found)
            self._read(ranks[half:], found)

    def _tell_activity(self) -> None:
        record = json.dumps(self._activity.report().to_dict())
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/activity/{self._rank}", record)

    def first_error(self) -> FirstError | None:
        """The first error of the job, if there was one."""
        if self._first is None:
            try:
                with self._lock:
                    if self._store.check([self._key]):
                        record = json.loads(self._store.get(self._key))
                        self._first = FirstError(
                            rank=record["rank"],
                            text=record["text"],
                            hanging=tuple(record["hanging"]),
                        )
            except RuntimeError:
                text = "the job's key-value store is gone: rank 0 or its launcher has ended"
                self._first = FirstError(rank=None, text=text)
        return self._first

    def _watch(self) -> None:
        self._tell_activity()  # so that a rank is known to have been there
        while not self._done.wait(_POLL_SECONDS):
            first = self.first_error()
            if first is None:
                self._tell_activity()
                continue
            if first.rank is None and self.orderly:
                return  # rank 0 has finished, this rank may still have work of its own
            grace = self._grace_seconds * (2 if self.reported else 1)
            if self._done.wait(grace):
                return
            where = self._own_traceback
            if self._rank in first.hanging:
                where = f"{_main_thread_stack()}[rank {self._rank}] stands there. "
            print(
                f"{where}[rank {self._rank}] ending because {first.text}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def _main_thread_stack() -> str:
    """Where the main thread is now; the innermost calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame is not None else ""
