"""Reads a run back from the files it logged: record, CSV, W&B offline, TensorBoard."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_entrain.errors import DataError
from lightning_entrain.observe.run_record import RECORD_FILE, RunRecord, Series
from lightning_entrain.observe.wandb_file import read_wandb_file

_STEP_KEYS = ("trainer/global_step", "step", "_step")


def read_run(path: Path) -> RunRecord:
    """The record of a run, from the best of the files found at a path.

    Args:
        path: A run's folder, or one of its files: `run_record.json`, a CSV of values by step, a
            `.wandb` file, or TensorBoard events.

    Raises:
        DataError: If there is none of them, or it cannot be read.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist", remedy="pass the folder of a run")
    record = None
    for pattern, read in _READERS:
        for found in [path] if path.is_file() else sorted(path.rglob(pattern)):
            if not found.match(pattern):
                continue
            if record is None:
                record = read(found)
                record.name = record.name or _name(path)
            elif not record.series:
                record.series = read(found).series
            break
    if record is None:
        raise DataError(
            f"{path} holds no logged values",
            limit=", ".join(pattern for pattern, _ in _READERS),
            remedy="pass the folder that the run printed at its end",
        )
    return record


def read_record(path: Path) -> RunRecord:
    """A `run_record.json`."""
    return RunRecord.from_json(path.read_text(encoding="utf-8"))


def read_csv(path: Path) -> RunRecord:
    """A CSV with a column `step`, as Lightning's CSVLogger writes it."""
    series: dict[str, Series] = {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if "step" not in (rows.fieldnames or ()):
            raise DataError(f"{path} has no column step", remedy="pass a metrics.csv")
        for row in rows:
            _add(series, int(float(row["step"])), row)
    return _from_series(series)


def read_wandb(path: Path) -> RunRecord:
    """A `.wandb` file of an offline run."""
    file = read_wandb_file(path)
    series: dict[str, Series] = {}
    for row in file.history:
        step = next((row[key] for key in _STEP_KEYS if key in row), 0)
        media = tuple(key[: -len("_type")] for key in row if key.endswith("/_type"))
        values = {key: value for key, value in row.items() if not (key + "/").startswith(media)}
        _add(series, int(step), values if media else row)
    record = _from_series(series)
    record.name = file.name
    record.status = "finished" if file.complete else "not finished"
    plan = file.config.get("plan")
    record.plan = dict(plan) if isinstance(plan, Mapping) else {}
    return record


def read_tensorboard(path: Path) -> RunRecord:
    """TensorBoard events; needs the package tensorboard."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise DataError(
            f"{path} needs the package tensorboard to be read",
            remedy="install tensorboard, or log a CSV file too",
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return _from_series(
        {
            key: [(int(event.step), float(event.value)) for event in events.Scalars(key)]
            for key in events.Tags()["scalars"]
        }
    )


_READERS: tuple[tuple[str, Callable[[Path], RunRecord]], ...] = (
    (RECORD_FILE, read_record),
    ("*.csv", read_csv),
    ("*.wandb", read_wandb),
    ("events.out.tfevents.*", read_tensorboard),
)


def _name(path: Path) -> str:
    return path.absolute().name if path.is_dir() else path.absolute().parent.name


def _from_series(series: dict[str, Series]) -> RunRecord:
    num_steps = max((values[-1][0] + 1 for values in series.values() if values), default=0)
    return RunRecord(series=series, num_steps=num_steps)


def _add(series: dict[str, Series], step: int, row: Mapping[str, Any]) -> None:
    """Take the numbers of a row that are logged values."""
    for key, value in row.items():
        if "/" not in str(key) or key in _STEP_KEYS or value in (None, ""):
            continue
        try:
            number = float(value if not isinstance(value, str) else json.loads(value))
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            series.setdefault(key, []).append((step, number))
