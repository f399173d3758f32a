"""Leaving together when the scheduler asks for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

STOP, REQUEUE = 1, 2
"""What a signal asks for: end after this step, or end and be queued again (SLURM)."""

EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Notes SIGTERM (and SLURM's requeue signal) without acting inside the handler.

    Ranks are at different places when a signal arrives, so none may start a collective there. The
    request is shared with the next step's plan comparison, and all ranks leave after that step.

    A rank that is blocked in native code never gets to run its handler. A thread that the signal
    wakes by itself ends the process if it is still there after the grace period.

    Args:
        grace_seconds: How long the rank may take to finish its step and save.
        requeue_signal: SLURM's signal, if the job requeues itself.
    """

    def __init__(self, grace_seconds: float, requeue_signal: signal.Signals | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._kinds = {signal.SIGTERM: STOP}
        if requeue_signal is not None:
            self._kinds[requeue_signal] = REQUEUE
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_wakeup = -1
        self._done = threading.Event()
        self.kind = 0

    def install(self) -> None:
        """Take the signals over; only the main thread can."""
        for number in self._kinds:
            signal.signal(number, self._handle)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="entrain-signals").start()

    def remove(self) -> None:
        """Stop watching. Lightning puts the former handlers back."""
        self._done.set()
        signal.set_wakeup_fd(self._old_wakeup)
        os.write(self._write, b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.kind and number == signal.SIGTERM:
            os._exit(EXIT_CODE)  # asked twice
        self.kind = max(self.kind, self._kinds[signal.Signals(number)])

    def _watch(self) -> None:
        wanted = {int(number) for number in self._kinds}
        while not wanted & set(os.read(self._read, 16)):
            if self._done.is_set():
                return
        if not self._done.wait(self._grace_seconds):
            print(
                f"ending: this rank did not finish its step within {self._grace_seconds:g} s of "
                "the request to stop",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CODE)
