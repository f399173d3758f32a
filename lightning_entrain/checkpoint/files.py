"""Checkpoint files and folders that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH

from lightning_entrain.errors import CheckpointError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write to the path that is yielded; ``path`` appears, or is replaced, when the block ends.

    If the block raises, ``path`` stays as it was. A process that dies inside leaves a hidden
    ``.partial-*`` behind, which the next write of the same path removes.

    Args:
        path: File or folder on a local (or shared) filesystem.
    """
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_now(partial)
    try:
        yield partial
        replace_path(partial, path)
    except BaseException:
        remove_now(partial)
        raise


def partial_path(path: Path) -> Path:
    """Where ``path`` is written until it is whole.

    The name does not contain that of the checkpoint: Lightning looks for names such as ``last`` and
    ``hpc_ckpt_`` in folders.
    """
    return _hidden(path, "partial")


def replace_path(partial: Path, path: Path) -> None:
    """Give a finished file or folder its name in one step, then remove what had it before."""
    former = _hidden(path, "former")
    if not os.path.lexists(path) or not (path.is_dir() or partial.is_dir()):
        os.replace(partial, path)
    elif _exchange(partial, path):
        remove_now(partial)
    else:
        remove_now(former)
        os.rename(path, former)
        os.rename(partial, path)
    sync_folder(path.parent)
    remove_now(former)


def existing(path: Path) -> Path:
    """``path``, or what it was if a process died while replacing it on a simple filesystem."""
    former = _hidden(path, "former")
    return former if not os.path.lexists(path) and os.path.lexists(former) else path


def remove_whole(path: Path) -> None:
    """Remove a checkpoint so that no half-removed folder keeps its name."""
    if path.is_dir() and not path.is_symlink():
        hidden = _hidden(path, "removed")
        remove_now(hidden)
        os.rename(path, hidden)
        path = hidden
    remove_now(path)


def remove_now(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network filesystems cannot
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EIO):
            raise
    finally:
        os.close(handle)


def save_synced(value: Any, path: Path) -> None:
    """``torch.save`` to a new file, down to the disk."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides it behind its own
            raise error.__context__ from None
        raise


class EntrainCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints, with three differences on local filesystems.

    A file is written under another name on the same filesystem and renamed when it is whole.
    A folder that ``EntrainStrategy(checkpoint="sharded")`` wrote is read as if it were a file; pass
    this as ``Trainer(plugins=[EntrainCheckpointIO()])`` to read one without the strategy.
    Files can be mapped into memory, so that a rank reads its own part only.

    Args:
        memory_map: Map files instead of reading them. Tensors must then be copied before use.
    """

    def __init__(self, *, memory_map: bool = False) -> None:
        self.memory_map = memory_map

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint file; a former one of that name stays whole until this one is."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with written_whole(local_path(path)) as partial:
            save_synced(checkpoint, partial)

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint file or folder.

        Raises:
            CheckpointError: If it is damaged, or a folder without a whole checkpoint.
        """
        from lightning_entrain.checkpoint.sharded import as_consolidated, read_sharded

        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location, weights_only)
        found = existing(local_path(path))
        if found.is_dir():
            return read_sharded(found)
        if found.is_file() and not zipfile.is_zipfile(found) and _begins_like_a_zip(found):
            raise CheckpointError(
                f"{path} is cut off",
                limit="a whole file",
                remedy="use another checkpoint; copy the file again if it was copied",
            )
        try:
            if self.memory_map and zipfile.is_zipfile(found):
                read = torch.load(found, map_location="cpu", mmap=True, weights_only=weights_only)
            else:
                read = super().load_checkpoint(found, map_location, weights_only)
        except (pickle.UnpicklingError, EOFError) as error:
            if zipfile.is_zipfile(found):
                raise  # a checkpoint that holds more than weights: torch tells what
            raise CheckpointError(
                f"{path} is not a checkpoint",
                limit="a file that Lightning or torch.save wrote",
                remedy="name another file",
            ) from error
        return as_consolidated(read)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint file or folder."""
        if _is_local_file_protocol(path):
            remove_whole(local_path(path))
        else:
            super().remove_checkpoint(path)


def local_path(path: _PATH) -> Path:
    """A path of the local filesystem, maybe given as ``file://``.

    Raises:
        CheckpointError: If it lies elsewhere.
    """
    if not _is_local_file_protocol(path):
        raise CheckpointError(
            f"{path} is not on a local or mounted filesystem",
            limit="sharded checkpoints are folders of files",
            remedy='use checkpoint="consolidated", or a mounted folder',
        )
    return Path(str(path).removeprefix("file://"))


def _begins_like_a_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _hidden(path: Path, what: str) -> Path:
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:12]
    return path.with_name(f".{what}-{digest}")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    at_working_folder, exchange = -100, 2
    names = os.fsencode(first), os.fsencode(second)
    if swap(at_working_folder, names[0], at_working_folder, names[1], exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))
