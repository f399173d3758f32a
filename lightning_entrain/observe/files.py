"""Writing what a run would like to leave behind, without ending it where that fails."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def write_text(path: Path, text: str) -> Path | None:
    """Write a file and the folders above it.

    Returns:
        The path; None, with a warning, where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rank_zero_warn(f"{path.name} is not written: {error}")
        return None
    return path
