"""Reads what an offline W&B run wrote: a log of protobuf records in 32 KiB blocks."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_entrain.errors import DataError

_MAGIC = b":W&B"
_FILE_HEADER = 7
_BLOCK = 32768
_RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class WandbFile:
    """Content of a `.wandb` file.

    Attributes:
        history: Logged rows in order, keys joined by `/` and `.` as they were logged.
        config: The run's config.
        metrics: Definitions of metrics: name or pattern, step metric, summaries.
        artifacts: Types and names of artifacts that were logged.
        name: The run's name.
        group: The run's group, empty for none.
        complete: Whether the run was finished.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    name: str = ""
    group: str = ""
    complete: bool = False


def read_wandb_file(path: Path) -> WandbFile:
    """Read a `.wandb` file.

    Raises:
        DataError: If it is no such file.
    """
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    metrics: dict[str, dict[str, Any]] = {}
    artifacts: list[tuple[str, str]] = []
    name = group = ""
    complete = False
    for data in _records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append(_items(record.history.item))
        elif kind == "run":
            name, group = record.run.display_name, record.run.run_group
            config.update(_items(record.run.config.update))
        elif kind == "config":
            config.update(_items(record.config.update))
        elif kind == "metric":
            metric = record.metric
            summary = [s.name for s, on in metric.summary.ListFields() if on is True]
            metrics[metric.glob_name or metric.name] = {
                "step_metric": metric.step_metric,
                "summary": summary,
            }
        elif kind == "artifact":
            artifacts.append((record.artifact.type, record.artifact.name))
        elif kind == "request" and record.request.HasField("log_artifact"):
            artifact = record.request.log_artifact.artifact
            artifacts.append((artifact.type, artifact.name))
        elif kind == "exit":
            complete = True
    return WandbFile(
        history=history,
        config=config,
        metrics=metrics,
        artifacts=artifacts,
        name=name,
        group=group,
        complete=complete,
    )


def _items(items: Any) -> dict[str, Any]:
    return {
        "/".join(item.nested_key) if item.nested_key else item.key: json.loads(item.value_json)
        for item in items
    }


def _records(path: Path) -> Iterator[bytes]:
    """The records' bytes; a torn one at the end is left out."""
    content = path.read_bytes()
    if content[:4] != _MAGIC:
        raise DataError(f"{path} does not start as a W&B file does", remedy="pass a .wandb file")
    parts: list[bytes] = []
    position = _FILE_HEADER
    while position + _RECORD_HEADER.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER.size:
            position += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(content, position)
        position += _RECORD_HEADER.size
        piece = content[position : position + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return
        position += length
        parts = [piece] if kind in (_FULL, _FIRST) else [*parts, piece]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
