"""What the planning apps write: checked before the work, written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lightning_entrain.errors import ConfigError, DataError


def check_file(path: str | os.PathLike[str]) -> Path:
    """Check that a file can be written there, before the work that it takes to fill it.

    Raises:
        ConfigError: If the path is a folder's, or its folder is missing or cannot be written.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(
            f"output is {str(path)!r}, which is a folder",
            limit="the name of a file",
            remedy=f"set output={file / 'FILE'}",
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"output is {str(path)!r}, and there is no folder {file.parent}",
            limit="a file in a folder that exists",
            remedy=f"make it with mkdir -p {file.parent}, or set output=FILE elsewhere",
        )
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"output is {str(path)!r}, and {file.parent} cannot be written",
            limit="a folder that you may write to",
            remedy="set output=FILE elsewhere",
        )
    return file


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of several files, before the work that it takes to fill them.

    Raises:
        ConfigError: If it cannot be made or written.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(
            f"output is {str(path)!r}: {reason}",
            limit="a folder, or a path where one can be made",
            remedy="set output=FOLDER elsewhere",
        )
    return folder


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; nothing else stays beside it.

    Raises:
        DataError: If it cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}",
            limit="room on the disk, and a place that you may write to",
            remedy="set output elsewhere",
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
