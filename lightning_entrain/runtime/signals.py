"""Leaving together when the scheduler asks for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

STOP, REQUEUE = 1, 2
"""What a signal asks for: end after this step, or end and be queued again (SLURM)."""

EXIT_CODE = 128 + signal.SIGTERM
_ASKED_TWICE_SECONDS = 3.0


class StopRequest:
    """Notes SIGTERM (and SLURM's requeue signal) without acting inside the handler.

    Ranks are at different places when a signal arrives, so none may start a collective there. The
    request is shared with the next step's plan comparison, and all ranks leave after that step.

    A rank that is blocked in native code never gets to run its handler. A thread that the signal
    wakes by itself ends the process if it is still there after the grace period.

    Args:
        grace_seconds: How long the rank may take to finish its step.
        requeue_signal: SLURM's signal, if the job requeues itself.
    """

    def __init__(self, grace_seconds: float, requeue_signal: signal.Signals | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._kinds = {signal.SIGTERM: STOP}
        if requeue_signal is not None:
            self._kinds[requeue_signal] = REQUEUE
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup = -1
        self._done = threading.Event()
        self._saving = False
        self._asked_at = 0.0
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
        now = time.monotonic()
        # A scheduler and torchrun both pass a signal on, so that two may come at once.
        if self.kind and number == signal.SIGTERM and now - self._asked_at > _ASKED_TWICE_SECONDS:
            os._exit(EXIT_CODE)
        if not self.kind:
            self._asked_at = now
        self.kind = max(self.kind, self._kinds[signal.Signals(number)])

    def _watch(self) -> None:
        assert self._pipe is not None
        read, write = self._pipe
        wanted = {int(number) for number in self._kinds}
        while not wanted & set(os.read(read, 16)):
            if self._done.is_set():
                os.close(read)
                os.close(write)
                return
        if not self._done.wait(self._grace_seconds) and not self._saving:
            print(
                f"ending: this rank did not finish its step within {self._grace_seconds:g} s of "
                "the request to stop (stop_seconds)",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CODE)
