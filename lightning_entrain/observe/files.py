"""Writing what a run would like to leave behind, without ending it where that fails."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def write_text(path: Path, text: str) -> Path | None:
    """Write a file, whole or not at all, and the folders above it.

    Returns:
        The path; None, with a warning, where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        rank_zero_warn(f"{path.name} is not written: {error}")
        return None
    return path
