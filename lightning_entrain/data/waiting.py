"""Waiting for the process that prepares the data."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_entrain.data.cache import cache_root, short_digest, write_atomically
from lightning_entrain.errors import DataError
from lightning_entrain.job_ranks import job_name

_POLL_SECONDS = 0.5
_SILENT_SECONDS = 10.0


def wait_until_prepared(
    is_prepared: Callable[[], bool],
    *,
    rank: int,
    timeout_seconds: float = 3600.0,
    failure: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait for others to write the caches; all ranks may have been started at once.

    Rank 0 writes them, and where machines have their own, the first rank of each.

    torchrun and SLURM start all ranks at once, and the ranks are not connected yet: connecting
    them needs the model, and the model needs the tokenizer.

    Args:
        is_prepared: Whether the caches are there.
        rank: This rank, for messages.
        timeout_seconds: Longest wait.
        failure: Says why rank 0 could not prepare the data, if it could not.

    Raises:
        DataError: If they are still missing after that, or rank 0 has failed.
    """
    begin = time.monotonic()
    told = False
    while not is_prepared():
        if (reason := failure()) is not None:
            raise DataError(f"Rank 0 could not prepare the data: {reason}")
        waited = time.monotonic() - begin
        if waited > timeout_seconds:
            raise DataError(
                f"Rank {rank} has waited {waited:.0f} s for rank 0 to prepare the data",
                limit="its caches are seen by all ranks, or written on each machine, within "
                f"prepare_timeout_seconds={timeout_seconds:g}",
                remedy="set data.cache_dir to a folder that all ranks of a machine see, wait "
                "longer, or prepare the data in a run on one process first",
            )
        if waited > _SILENT_SECONDS and not told:
            told = True
            print(f"[rank {rank}] waiting for rank 0 to prepare the data", file=sys.stderr)
        time.sleep(_POLL_SECONDS)


class FailureNote:
    """A file by which rank 0 tells waiting ranks that it has failed.

    Args:
        path: The file; None where a job has no name by which it is told from others.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of_job(cls, cache_dir: str | os.PathLike[str] | None) -> FailureNote:
        """The note of this process's job, in the folder for caches."""
        job = job_name()
        path = cache_root(cache_dir) / f".failed-{short_digest(job)}" if job else None
        return cls(path)

    @contextmanager
    def left_behind(self) -> Iterator[None]:
        """Leave the note if the block fails, and none if it does not."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            if self._path is not None:
                text = f"{type(error).__name__}: {error}".encode()
                with suppress(OSError, DataError):
                    write_atomically(self._path, lambda file: _write(file, text))
            raise

    def read(self) -> str | None:
        """What went wrong; None as long as nothing did."""
        if self._path is None:
            return None
        try:
            return self._path.read_text(errors="replace")
        except OSError:
            return None


def _write(file: BinaryIO, text: bytes) -> None:
    file.write(text)
