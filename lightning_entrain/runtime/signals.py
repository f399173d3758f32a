"""Leaving together when the scheduler or the user asks for it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from types import FrameType

INTERRUPT, STOP, REQUEUE = 1, 2, 3
"""What signals ask for: to end after this step (Ctrl-C, SIGTERM), or to be queued again as well."""

EXIT_CODE = 128 + signal.SIGTERM
EXIT_CODES = {INTERRUPT: 128 + signal.SIGINT, STOP: EXIT_CODE, REQUEUE: EXIT_CODE}
"""Of a process that was asked to leave, by what it was asked for."""

# A scheduler, a terminal and torchrun pass signals on, so that the same one may come twice at once.
_ASKED_TWICE_SECONDS = {INTERRUPT: 1.0, STOP: 3.0}


class StopRequest:
    """Notes Ctrl-C, SIGTERM and SLURM's requeue signal without acting inside the handler.

    Ranks are at different places when a signal arrives, so none may start a collective there. The
    request is shared with the next step's plan comparison, and all ranks leave after that step.
    The same signal once more ends the process at once.

    A rank that is blocked in native code never gets to run its handler. A thread that the signal
    wakes by itself ends the process if it is asked again, or is still there after the grace period.

    Args:
        grace_seconds: How long the rank may take to finish its step.
        requeue_signal: SLURM's signal, if the job requeues itself.
        announce: Whether to tell the user at the first Ctrl-C what a second one does.

    Attributes:
        kind: What was asked for; 0 for nothing.
    """

    def __init__(
        self,
        grace_seconds: float,
        requeue_signal: signal.Signals | None = None,
        *,
        announce: bool = False,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._kinds = {signal.SIGINT: INTERRUPT, signal.SIGTERM: STOP}
        if requeue_signal is not None:
            self._kinds[requeue_signal] = REQUEUE
        self._announce = announce
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup = -1
        self._done = threading.Event()
        self._saving = False
        self.kind = 0

    def install(self) -> None:
        """Take the signals over, in the main thread; does nothing elsewhere.

        Lightning sets its own handlers at the start of each run, so this is called at the start of
        every loop.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._kinds:
            signal.signal(number, self._handle)
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._watch, daemon=True, name="entrain-signals").start()

    def remove(self) -> None:
        """Stop watching. Lightning puts the former handlers back."""
        self._done.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            os.write(self._pipe[1], b"\0")

    def saving(self) -> None:
        """The step is over and the checkpoint is being written: that takes as long as it takes."""
        self._saving = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.kind = max(self.kind, self._kinds[signal.Signals(number)])

    def _watch(self) -> None:
        assert self._pipe is not None
        read, write = self._pipe
        first: dict[int, float] = {}
        while True:
            select.select([read], [], [], self._seconds_left(first))
            came = os.read(read, 16) if select.select([read], [], [], 0)[0] else b""
            if self._done.is_set():
                os.close(read)
                os.close(write)
                return
            now = time.monotonic()
            for number in came:
                if number in self._kinds:
                    self._count(self._kinds[signal.Signals(number)], first, now)
            if self._seconds_left(first) == 0 and not self._saving:
                print(
                    f"ending: this rank did not finish its step within {self._grace_seconds:g} s "
                    "of the request to stop (stop_seconds)",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(EXIT_CODES[max(first)])

    def _seconds_left(self, first: dict[int, float]) -> float | None:
        """Until the grace period ends; None, which waits for ever, if there is none."""
        if not first or self._saving:
            return None
        return max(min(first.values()) + self._grace_seconds - time.monotonic(), 0)

    def _count(self, kind: int, first: dict[int, float], now: float) -> None:
        if kind not in first:
            first[kind] = now
            if kind == INTERRUPT and self._announce:
                print(
                    "\nStopping all ranks after this step; Ctrl-C again ends them at once.",
                    file=sys.stderr,
                    flush=True,
                )
        elif now - first[kind] > _ASKED_TWICE_SECONDS.get(kind, float("inf")):
            os._exit(EXIT_CODES[kind])
