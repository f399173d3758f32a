"""Folders of parquet files in FineVision's schema: columns ``images`` and ``texts``."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_entrain.data.cache import short_digest
from lightning_entrain.data.records import Turn
from lightning_entrain.errors import ConfigError, DataError, SampleError

SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)
"""What is written. Images given as plain bytes, without a path, are read as well."""

_CACHED_BYTES = 256 * 2**20
_OPEN_FILES = 16


def write_samples(
    file: BinaryIO,
    samples: Iterable[tuple[Sequence[bytes], Sequence[Turn]]],
    *,
    group_size: int = 8,
) -> None:
    """Write samples (their images, their turns) to an open file.

    Args:
        file: Binary file open for writing.
        samples: Samples in order.
        group_size: Samples per row group: what has to be read to get at one of them.
    """
    sink = _Sink(file)
    # Images are compressed already.
    with pq.ParquetWriter(sink, SCHEMA, compression="none", use_dictionary=False) as writer:
        rows: list[dict[str, Any]] = []
        for images, turns in samples:
            rows.append(
                {
                    "images": [{"bytes": data, "path": None} for data in images],
                    "texts": [{"user": t.user, "assistant": t.assistant} for t in turns],
                }
            )
            if len(rows) == group_size:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                sink.check()
                rows = []
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    sink.check()


class _Sink:
    """Keeps the first error of a file from pyarrow.

    A writer that met an error tries once more whenever it happens to be collected; this way it
    finds nothing wrong, and the error is raised where it belongs.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Left to the owner of the file."""

    def close(self) -> None:
        """Left to the owner of the file."""


class _Group(NamedTuple):
    path: Path
    number: int
    first_row: int


class ParquetSource:
    """All samples of the parquet files below a folder, in the order of their names.

    A row holds a list of images (structs with the field ``bytes``, or plain bytes; empty for
    text-only samples) and a list of turns (structs with the fields ``user`` and ``assistant``).

    Args:
        folder: Where the files lie, at any depth.
        max_samples: Take only this many, the first; None takes all.
        image_column: Name of the column of images.
        text_column: Name of the column of turns.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_samples: int | None = None,
        image_column: str = "images",
        text_column: str = "texts",
    ) -> None:
        if max_samples is not None and max_samples < 1:
            raise ConfigError(
                f"max_samples is {max_samples}", limit="at least 1", remedy="null takes all"
            )
        self.folder = Path(folder).expanduser()
        self.name = str(self.folder)
        self.max_samples = max_samples
        self._columns = {"images": image_column, "texts": text_column}
        self._groups: list[_Group] | None = None
        self._num_samples = 0
        self._reset()

    def _reset(self) -> None:
        self._files: OrderedDict[Path, pq.ParquetFile] = OrderedDict()
        self._cached: OrderedDict[tuple[str, int], pa.ChunkedArray] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        # Open files and cached rows stay behind: a copy in another process opens its own.
        return {**self.__dict__, "_files": OrderedDict(), "_cached": OrderedDict()}

    def prepare(self) -> None:
        """Check that the folder holds readable files of the right columns.

        Raises:
            DataError: If it does not.
        """
        self._groups = None
        self._reset()
        self._scan()

    def fingerprint(self) -> str:
        """Changes with the names, sizes and modification times of the files, and the options."""
        parts = [f"{self.max_samples}", *self._columns.values()]
        for path in self._paths():
            status = path.stat()
            name = path.relative_to(self.folder).as_posix()
            parts.append(f"{name},{status.st_size},{status.st_mtime_ns}")
        return short_digest(*parts)

    def __len__(self) -> int:
        self._scan()
        return self._num_samples

    def texts(self, index: int) -> tuple[Turn, ...]:
        """The sample's turns; the images are not read."""
        turns = self._read("texts", index) or ()
        return tuple(Turn(turn.get("user") or "", turn.get("assistant") or "") for turn in turns)

    def images(self, index: int) -> tuple[bytes, ...]:
        """The sample's image files; the texts are not read."""
        found = []
        for image in self._read("images", index) or ():
            data = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(data, bytes):
                raise SampleError(
                    f"Sample {index} of {self.name} has an image without bytes ({image!r:.60})",
                    limit="images are stored in the parquet file itself",
                )
            found.append(data)
        return tuple(found)

    def _paths(self) -> list[Path]:
        remedy = "check the path, or choose another data source"
        if not self.folder.is_dir():
            raise DataError(
                f"The data folder {self.folder} does not exist or is no folder",
                limit="a folder that holds parquet files",
                remedy=remedy,
            )
        paths = sorted(self.folder.rglob("*.parquet"))
        # A name with a leading dot is a file still being written.
        paths = [path for path in paths if not path.name.startswith(".")]
        if not paths:
            raise DataError(
                f"The data folder {self.folder} holds no parquet file",
                limit="at least one file *.parquet at any depth",
                remedy=remedy,
            )
        return paths

    def _scan(self) -> list[_Group]:
        if self._groups is not None:
            return self._groups
        groups: list[_Group] = []
        num_rows = 0
        for path in self._paths():
            file = self._open(path)
            missing = [c for c in self._columns.values() if c not in file.schema_arrow.names]
            if missing:
                raise DataError(
                    f"{path} has no column {missing[0]!r}; it has "
                    + ", ".join(repr(name) for name in file.schema_arrow.names),
                    limit="FineVision's schema: a list of images and a list of texts",
                    remedy="name the columns by image_column and text_column",
                )
            self._check_types(path, file.schema_arrow)
            for number in range(file.metadata.num_row_groups):
                if length := file.metadata.row_group(number).num_rows:
                    groups.append(_Group(path, number, num_rows))
                    num_rows += length
        if not num_rows:
            raise DataError(
                f"The parquet files in {self.folder} hold no sample", limit="at least one row"
            )
        self._num_samples = min(num_rows, self.max_samples or num_rows)
        self._groups = groups
        return groups

    def _check_types(self, path: Path, schema: pa.Schema) -> None:
        for part, limit, fits in (
            ("images", "a list of structs with the field bytes, or of bytes", _holds_images),
            ("texts", "a list of structs with the text fields user and assistant", _holds_turns),
        ):
            name = self._columns[part]
            found = schema.field(name).type
            if not (pa.types.is_null(found) or (_is_list(found) and fits(found.value_type))):
                raise DataError(
                    f"{path}: column {name!r} is of type {found}",
                    limit=limit,
                    remedy=f"convert it, or name another column by {part[:-1]}_column",
                )

    def _open(self, path: Path) -> pq.ParquetFile:
        if path not in self._files:
            try:
                self._files[path] = pq.ParquetFile(path)
            except (OSError, pa.ArrowException) as error:
                raise _damaged(path, error) from error
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        return self._files[path]

    def _read(self, part: str, index: int) -> Any:
        groups = self._scan()
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        g = bisect_right(groups, index, key=lambda group: group.first_row) - 1
        return self._column(part, g, groups[g])[index - groups[g].first_row].as_py()

    def _column(self, part: str, g: int, group: _Group) -> pa.ChunkedArray:
        """One column of one row group, kept in memory while there is room."""
        key = part, g
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        name = self._columns[part]
        try:
            table = self._open(group.path).read_row_group(
                group.number, columns=[name], use_threads=False
            )
        except (OSError, pa.ArrowException) as error:
            raise _damaged(group.path, error) from error
        self._cached[key] = table.column(name)
        total = sum(column.nbytes for column in self._cached.values())
        while total > _CACHED_BYTES and len(self._cached) > 1:
            total -= self._cached.popitem(last=False)[1].nbytes
        return self._cached[key]


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _holds_images(kind: pa.DataType) -> bool:
    return _is_of_bytes(_field(kind, "bytes") if pa.types.is_struct(kind) else kind)


def _holds_turns(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    return pa.types.is_struct(kind) and all(
        _is_of_text(_field(kind, name)) for name in ("user", "assistant")
    )


def _field(kind: pa.StructType, name: str) -> pa.DataType | None:
    index = kind.get_field_index(name)
    return kind.field(index).type if index >= 0 else None


def _is_of_bytes(kind: pa.DataType | None) -> bool:
    types = pa.types
    return kind is not None and (
        types.is_null(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _is_of_text(kind: pa.DataType | None) -> bool:
    types = pa.types
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    return kind is not None and (
        types.is_null(kind) or types.is_string(kind) or types.is_large_string(kind)
    )


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is damaged or no parquet file ({str(error).splitlines()[0]})",
        limit="a whole parquet file",
        remedy="fetch or write the file again, or take it out of the folder",
    )
