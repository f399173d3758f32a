"""Where caches lie, and how they are written: whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from lightning_entrain.errors import DataError

CACHE_VARIABLE = "LIGHTNING_ENTRAIN_CACHE"
"""Environment variable that names the folder for caches."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def cache_root(option: str | os.PathLike[str] | None = None) -> Path:
    """Folder for caches: the option, the environment variable, or the user's cache folder.

    Args:
        option: What the user passed as ``cache_dir``; None to fall back.
    """
    named = option or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lightning_entrain"


def cache_folders(
    data: str | os.PathLike[str] | None, option: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Folders for what is derived from the data, best first.

    Args:
        data: Folder of the data, if it has one: caches lie beside it where no folder is named.
        option: What the user passed as ``cache_dir``.
    """
    root = cache_root(option)
    if data is None or option is not None:
        return [root]
    return [Path(data) / ".entrain", root]


def first_writable(folders: Sequence[Path]) -> Path:
    """The first folder that can be written, made if need be; the last in any case."""
    *better, last = folders
    for folder in better:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if is_writable(folder):
            return folder
    return last


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in that folder, found out by making one."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def short_digest(*parts: str) -> str:
    """Sixteen hex digits that change when any part does."""
    joined = "\0".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that it is found whole or not at all.

    The content goes to a temporary file in the same folder, is flushed to the disk and then takes
    the final name in one step. On any failure the temporary file is removed.

    Args:
        path: Final place. Missing folders are made.
        write: Writes the content to an open binary file.

    Raises:
        DataError: If the disk is full, the folder cannot be written, or writing fails otherwise.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a cache may be shared like any other file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise _write_error(path, error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _write_error(path: Path, error: OSError) -> DataError:
    remedy = f"pass cache_dir or set {CACHE_VARIABLE} to another folder"
    if error.errno in _FULL:
        return DataError(
            f"The disk is full: {path} could not be written ({error.strerror})",
            limit="a cache is written whole or not at all",
            remedy=f"free some space, or {remedy}",
        )
    if error.errno in _FORBIDDEN or isinstance(error, FileExistsError | NotADirectoryError):
        return DataError(
            f"{path} cannot be written ({error.strerror or error})",
            limit="the cache folder is writable",
            remedy=remedy,
        )
    return DataError(f"Writing {path} failed ({error})", remedy=remedy)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
