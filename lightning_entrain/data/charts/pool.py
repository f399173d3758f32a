"""Draw many charts at once, in processes of their own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict

from lightning_entrain.data.charts.sample import ChartOptions, ChartSample
from lightning_entrain.errors import DataError

_END_TIMEOUT_S = 5


def draw_samples(
    options: ChartOptions, num_samples: int, num_workers: int
) -> Generator[tuple[int, ChartSample], None, None]:
    """Yield samples 0 to ``num_samples`` - 1 as they are finished, in any order.

    Args:
        options: What to draw.
        num_samples: How many.
        num_workers: Processes that draw. They end with this call, however it ends.

    Raises:
        DataError: If a process fails; the message holds its error.
    """
    num_workers = max(1, min(num_workers, num_samples))
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, ChartSample] | BaseException] = queue.SimpleQueue()
    for index in range(num_samples):
        todo.put(index)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_workers):
            workers.append(_start(options))
        with ThreadPoolExecutor(num_workers) as threads:
            try:
                for worker in workers:
                    threads.submit(_drive, worker, todo, done)
                for _ in range(num_samples):
                    result = done.get()
                    if isinstance(result, BaseException):
                        raise result
                    yield result
            finally:
                _empty(todo)
                _stop(workers)
    finally:
        _stop(workers)


def _start(options: ChartOptions) -> subprocess.Popen[bytes]:
    # The processes share the machine; each must not start as many threads as it has cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "lightning_entrain.data.charts.worker"]
    return subprocess.Popen(
        [*command, json.dumps(asdict(options))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _drive(
    worker: subprocess.Popen[bytes],
    todo: queue.SimpleQueue[int],
    done: queue.SimpleQueue[tuple[int, ChartSample] | BaseException],
) -> None:
    """Hand one process an index after another until none is left."""
    with suppress(queue.Empty):
        while True:
            index = todo.get_nowait()
            try:
                done.put((index, _ask(worker, index)))
            except BaseException as error:
                done.put(error)
                return


def _ask(worker: subprocess.Popen[bytes], index: int) -> ChartSample:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(f"{index}\n".encode())
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline())
        image = worker.stdout.read(answer["num_bytes"])
    except (OSError, ValueError) as error:
        raise DataError(
            f"A process that draws charts ended at chart {index} (exit code {worker.poll()})",
            remedy="see its error output above; try num_workers=1",
        ) from error
    if "error" in answer:
        raise DataError(
            f"Chart {index} could not be drawn: {answer['error']}",
            remedy='install "lightning_entrain[demo]"; the full trace was:\n' + answer["trace"],
        )
    return ChartSample(user=answer["user"], assistant=answer["assistant"], image=image or None)


def _empty(todo: queue.SimpleQueue[int]) -> None:
    with suppress(queue.Empty):
        while True:
            todo.get_nowait()


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """End all processes and wait for them."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        # Closed last: a thread may still be reading, and gets the end of the file now.
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
