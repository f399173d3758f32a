"""Leaving together when the scheduler or the user asks for it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPT, STOP, REQUEUE = 1, 2, 3
"""What signals ask for: to end after this step (Ctrl-C, SIGTERM), or to be queued again as well."""

EXIT_CODE = 128 + signal.SIGTERM
EXIT_CODES = {INTERRUPT: 128 + signal.SIGINT, STOP: EXIT_CODE, REQUEUE: EXIT_CODE}
"""Of a process that was asked to leave, by what it was asked for."""

_NAMES = {INTERRUPT: "Ctrl-C", STOP: "SIGTERM", REQUEUE: "SLURM's signal"}

# A scheduler, a terminal and torchrun pass signals on, so that the same one may come twice at once.
_ASKED_TWICE_SECONDS = {INTERRUPT: 1.0, STOP: 3.0}

_PUBLISH_SECONDS = 2.0


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
        on_forced_end: Called with the reason before the process is ended without having finished
            its step; for the other ranks, which would not know.

    Attributes:
        kind: What was asked for; 0 for nothing.
    """

    def __init__(
        self,
        grace_seconds: float,
        requeue_signal: signal.Signals | None = None,
        *,
        announce: bool = False,
        on_forced_end: Callable[[str], None] | None = None,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._kinds = {signal.SIGINT: INTERRUPT, signal.SIGTERM: STOP}
        if requeue_signal is not None:
            self._kinds[requeue_signal] = REQUEUE
        self._announce = announce
        self._on_forced_end = on_forced_end
        self._former_interrupt: Any = None
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
            former = signal.signal(number, self._handle)
            if number == signal.SIGINT and former != self._handle:
                self._former_interrupt = former
        if self._pipe is None:
            _installed.append(self)
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._watch, daemon=True, name="entrain-signals").start()

    def remove(self) -> None:
        """Stop watching. Ctrl-C has its former handler again; Lightning puts the others back."""
        self._done.set()
        if self._pipe is not None:
            _installed.remove(self)
            signal.set_wakeup_fd(self._old_wakeup)
            os.write(self._pipe[1], b"\0")
            if signal.getsignal(signal.SIGINT) == self._handle and self._former_interrupt:
                signal.signal(signal.SIGINT, self._former_interrupt)

    def forget_in_child(self) -> None:
        """Undo in a forked child what it has from its parent: the handlers, and the pipe.

        A signal to the child would not end it, and would reach the parent's watching thread.
        """
        assert self._pipe is not None
        signal.set_wakeup_fd(-1)
        for number in self._kinds:
            if signal.getsignal(number) == self._handle:
                interrupt = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)
        for end in self._pipe:
            os.close(end)
        self._pipe = None

    def saving(self) -> None:
        """The step is over and the checkpoint is being written: that takes as long as it takes."""
        self._saving = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.kind = max(self.kind, self._kinds[signal.Signals(number)])

    def _watch(self) -> None:
        assert self._pipe is not None
        read, write = self._pipe
        arrivals = select.poll()  # select() takes no descriptors from 1024 on
        arrivals.register(read, select.POLLIN)
        first: dict[int, float] = {}
        while True:
            left = self._seconds_left(first)
            ready = arrivals.poll(None if left is None else left * 1000)
            came = os.read(read, 16) if ready else b""
            if self._done.is_set():
                os.close(read)
                os.close(write)
                return
            now = time.monotonic()
            for number in came:
                if number in self._kinds:
                    self._count(self._kinds[signal.Signals(number)], first, now)
            if self._seconds_left(first) == 0 and not self._saving:
                text = (
                    f"did not finish its step within {self._grace_seconds:g} s of the request to "
                    "stop (stop_seconds)"
                )
                print(f"ending: this rank {text}", file=sys.stderr, flush=True)
                self._end(max(first), text)

    def _end(self, kind: int, text: str) -> None:
        """End this process; the store may not answer, so the others are told in a thread."""
        if self._on_forced_end is not None:
            told = threading.Thread(target=self._on_forced_end, args=(text,), daemon=True)
            told.start()
            told.join(_PUBLISH_SECONDS)
        os._exit(EXIT_CODES[kind])

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
            self._end(kind, f"was asked to stop again ({_NAMES[kind]}) and ended at once")


_installed: list[StopRequest] = []
_mask = threading.local()


def _hold_signals() -> None:
    """Before a fork: none may reach the child before it has handlers of its own."""
    if _installed:
        held = {number for request in _installed for number in request._kinds}
        _mask.former = signal.pthread_sigmask(signal.SIG_BLOCK, held)


def _release_signals() -> None:
    former = _mask.__dict__.pop("former", None)
    if former is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _start_child() -> None:
    for request in _installed:
        request.forget_in_child()
    _installed.clear()
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_start_child
)
