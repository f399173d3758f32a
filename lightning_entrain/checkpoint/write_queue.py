"""Writing in the background, one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class WriteQueue:
    """Runs tasks in a thread, in order; after one fails, none runs until the error is taken.

    So a former checkpoint, whose removal is queued behind the new one's writing, outlives a
    failure. The interpreter waits for the thread at its end.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether something is queued whose end nobody has waited for."""
        return self._last is not None

    def submit(self, task: Callable[[], object]) -> None:
        """Run a task after those before it."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="entrain-checkpoint")
        self._last = self._executor.submit(self._run, task)

    def wait(self) -> Exception | None:
        """Wait for all tasks; returns the first error since the last wait."""
        if self._last is not None:
            self._last.result()
            self._last = None
        error, self._error = self._error, None
        return error

    def close(self) -> Exception | None:
        """Wait, and end the thread."""
        error = self.wait()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        return error

    def _run(self, task: Callable[[], object]) -> None:
        if self._error is None:
            try:
                task()
            except Exception as error:
                self._error = error
