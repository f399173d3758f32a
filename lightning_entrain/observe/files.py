"""Writing what a run would like to leave behind, without ending it where that fails."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def files_dir(trainer: pl.Trainer) -> Path:
    """Where a run's files go by default: the first logger's folder, or `default_root_dir`.

    That is where `ModelCheckpoint` makes its folder, too. Rank 0 may call it alone.
    """
    loggers: list[Any] = list(trainer.loggers)
    if not loggers or not (own := getattr(loggers[0], "log_dir", None) or loggers[0].save_dir):
        return Path(trainer.default_root_dir)
    if getattr(loggers[0], "log_dir", None):
        return Path(own)
    version = loggers[0].version
    version = version if isinstance(version, str) else f"version_{version}"
    return Path(own) / str(loggers[0].name) / version


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
