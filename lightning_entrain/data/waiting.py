"""Waiting for the process that prepares the data."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from lightning_entrain.errors import DataError

_POLL_SECONDS = 0.5
_SILENT_SECONDS = 10.0


def wait_until_prepared(
    is_prepared: Callable[[], bool], *, rank: int, timeout_seconds: float = 3600.0
) -> None:
    """Wait for rank 0 to write the caches; other ranks may have been started along with it.

    torchrun and SLURM start all ranks at once, and the ranks are not connected yet: connecting
    them needs the model, and the model needs the tokenizer.

    Args:
        is_prepared: Whether the caches are there.
        rank: This rank, for messages.
        timeout_seconds: Longest wait.

    Raises:
        DataError: If they are still missing after that.
    """
    begin = time.monotonic()
    told = False
    while not is_prepared():
        waited = time.monotonic() - begin
        if waited > timeout_seconds:
            raise DataError(
                f"Rank {rank} has waited {waited:.0f} s for rank 0 to prepare the data",
                limit="all ranks see the caches that rank 0 writes",
                remedy="set data.cache_dir to a folder that all nodes see, or prepare the data in "
                "a run on one process first",
            )
        if waited > _SILENT_SECONDS and not told:
            told = True
            print(f"[rank {rank}] waiting for rank 0 to prepare the data", file=sys.stderr)
        time.sleep(_POLL_SECONDS)
