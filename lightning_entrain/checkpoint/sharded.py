"""Sharded checkpoints: a folder of torch.distributed.checkpoint to which each rank writes its part.

In the folder the model's tensors lie under ``model`` and the state of optimizer ``i`` under
``optimizer_i``, both by the name of the parameter, whatever the layout. ``meta.pt`` holds the rest
of the Lightning checkpoint. Lightning's own consolidation tool reads the folder; its output is what
:func:`join` takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_entrain.checkpoint.files import partial_path, remove_now, replace_path, save_synced
from lightning_entrain.errors import CheckpointError

MODEL = "model"
OPTIMIZER = "optimizer_"
RECORD = "entrain"
"""Key under which checkpoints of this package keep what Lightning's have no place for."""

META_FILE = "meta.pt"
_INDEX_FILE = ".metadata"

Content = dict[str, dict[str, Any]]
"""Tensors by part (``model``, ``optimizer_0``, ...) and name."""


class OwnState(dict[str, Any]):
    """A part of a state dict, and the names of the whole.

    Attributes:
        all_names: Names in the checkpoint.
    """

    all_names: tuple[str, ...] = ()


def is_sharded(path: str | Path) -> bool:
    """Whether a path is a folder that holds a sharded checkpoint."""
    return (Path(path) / _INDEX_FILE).is_file()


def split(checkpoint: Mapping[str, Any]) -> tuple[Content, dict[str, Any]]:
    """Part a Lightning checkpoint, or a rank's share of one, into tensors by name and the rest.

    Args:
        checkpoint: A consolidated checkpoint; optimizer state keyed by parameter ids.

    Returns:
        The content for the shards, and what goes into ``meta.pt``. Where the checkpoint does not
        tell the parameters' names, their ids stand in for them.
    """
    extra = dict(checkpoint)
    content: Content = {MODEL: dict(extra.pop("state_dict"))}
    record = dict(extra.get(RECORD, {}))
    record.setdefault("state_names", list(content[MODEL]))
    extra[RECORD] = record
    if "optimizer_states" in extra:
        names_of = record.get("optimizer_names")
        rest = []
        for index, state in enumerate(extra["optimizer_states"]):
            names = names_of[index] if names_of is not None else None
            content[f"{OPTIMIZER}{index}"] = {
                str(i) if names is None else names[i]: entry for i, entry in state["state"].items()
            }
            rest.append({key: value for key, value in state.items() if key != "state"})
        extra["optimizer_states"] = rest
    return content, extra


def join(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild a consolidated checkpoint.

    Args:
        parts: Content and the rest in one dictionary, as Lightning's consolidation tool writes it.
    """
    checkpoint = dict(parts)
    record = checkpoint.get(RECORD, {})
    model = checkpoint.pop(MODEL)
    known = [name for name in record.get("state_names", ()) if name in model]
    state = OwnState(
        {name: model[name] for name in (*known, *(n for n in model if n not in known))}
    )
    state.all_names = tuple(record.get("state_names", model))
    checkpoint["state_dict"] = state
    if "optimizer_states" in checkpoint:
        names_of = record.get("optimizer_names")
        states = []
        for index, rest in enumerate(checkpoint["optimizer_states"]):
            entries = checkpoint.pop(f"{OPTIMIZER}{index}", {})
            if names_of is None:
                by_id = {int(name): entry for name, entry in entries.items()}
            else:
                ids = {name: i for i, name in enumerate(names_of[index])}
                by_id = {ids[name]: entry for name, entry in entries.items()}
            states.append({"state": dict(sorted(by_id.items())), **rest})
        checkpoint["optimizer_states"] = states
    return checkpoint


def as_consolidated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint file's content; that of Lightning's consolidation tool in Lightning's form."""
    made_by_tool = "state_dict" not in checkpoint and MODEL in checkpoint and RECORD in checkpoint
    return join(checkpoint) if made_by_tool else checkpoint


def write_sharded(
    path: Path, content: Content, extra: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Write a folder together with all ranks of a group; it appears when it is whole.

    Args:
        path: The folder, on a filesystem that all ranks see.
        content: This rank's tensors; each name comes from one rank.
        extra: The rest; written by rank 0.
        group: A gloo group that nothing else uses meanwhile; None in a job of one process.

    Raises:
        OSError: On the rank where it happened; other ranks raise a CheckpointError.
    """
    partial = partial_path(path)
    first = group is None or dist.get_rank(group) == 0
    problem: Exception | None = None
    try:
        if first:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_now(partial)
            partial.mkdir()
    except OSError as error:
        problem = error
    require_success(problem, group)
    try:
        _no_warning_about_one_process()
        dcp.save(
            content,
            storage_writer=dcp.FileSystemWriter(partial),
            planner=DefaultSavePlanner(),
            process_group=group,
            no_dist=group is None,
        )
        if first:
            save_synced(dict(extra), partial / META_FILE)
            replace_path(partial, path)
    except BaseException as error:
        if first:
            remove_now(partial)
        if isinstance(error, CheckpointException) and error.failures:
            rank, (cause, _) = next(iter(error.failures.items()))
            if group is None or rank == dist.get_rank(group):
                raise cause from error
            raise CheckpointError(f"rank {rank} failed: {type(cause).__name__}: {cause}") from error
        raise


def read_sharded(folder: Path, wanted: Callable[[str, str], bool] | None = None) -> dict[str, Any]:
    """Read a sharded checkpoint, or a part of it, as a consolidated one.

    Args:
        folder: The checkpoint.
        wanted: Called with the part (``model``, ``optimizer_0``, ...) and the name of a tensor or
            parameter; only what it accepts is read. None reads all.

    Raises:
        CheckpointError: If the folder holds no whole checkpoint.
    """
    if not is_sharded(folder) or not (folder / META_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no whole checkpoint",
            limit=f"a folder with {_INDEX_FILE} and {META_FILE}",
            remedy="use another checkpoint; copy the folder again, hidden files included, if it "
            "was copied",
        )
    extra = torch.load(folder / META_FILE, map_location="cpu", weights_only=True)
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    paths: Mapping[str, tuple[str, ...]] = metadata.planner_data or {}
    flat: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        part, name, *_ = (*paths.get(key, (key,)), "")
        if wanted is None or wanted(part, name):
            flat[key] = None
            if isinstance(entry, TensorStorageMetadata):
                flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _no_warning_about_one_process()
    dcp.load(
        flat,
        storage_reader=reader,
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=True,
    )
    parts: dict[str, Any] = {MODEL: {}}
    for key, value in flat.items():
        _put(parts, paths.get(key, (key,)), value)
    return join({**extra, **parts})


def require_success(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank of a group if one of them has a problem; a collective.

    Raises:
        Exception: The problem itself, where it is.
        CheckpointError: On other ranks.
    """
    if group is not None:
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        texts: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        found = [(rank, other) for rank, other in enumerate(texts) if other is not None]
        if found and problem is None:
            raise CheckpointError(f"rank {found[0][0]} failed: {found[0][1]}")
    if problem is not None:
        raise problem


def _put(parts: dict[str, Any], path: Iterable[str], value: Any) -> None:
    *outer, last = path
    for key in outer:
        parts = parts.setdefault(key, {})
    parts[last] = value


def _no_warning_about_one_process() -> None:
    # Not in a context manager: those change the filters of all threads.
    warnings.filterwarnings("ignore", message=r".*assuming the intent is to (save|load)")
