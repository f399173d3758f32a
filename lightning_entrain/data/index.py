"""The size index: every sample's size, measured once and cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np

from lightning_entrain.data.cache import short_digest, write_atomically
from lightning_entrain.data.dataset import measure_sample
from lightning_entrain.data.progress import progress_bar
from lightning_entrain.data.records import Source
from lightning_entrain.data.tokenizer import TextTokenizer
from lightning_entrain.errors import DataError, SampleError
from lightning_entrain.workload.image_rule import ImageRule
from lightning_entrain.workload.sizes import SampleSize

_log = logging.getLogger(__name__)

INDEX_VERSION = 1
"""Raised whenever the same data and rules give other sizes, or the file's layout changes."""

_ARRAYS = ("rows", "grid_ends", "grids", "text_tokens", "label_tokens")


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used.

    Attributes:
        row: Its index in the source.
        value: What is wrong with it.
        limit: The rule it breaks.
        remedy: What the user can do about it.
    """

    row: int
    value: str
    limit: str
    remedy: str

    def error(self) -> SampleError:
        """As an error to raise."""
        return SampleError(self.value, limit=self.limit, remedy=self.remedy)


class SizeTable(Sequence[SampleSize]):
    """Sizes of many samples in a few arrays: cheap to keep, to pickle and to store.

    Attributes:
        rows: ``[samples]``, index in the source of every sample.
        bad: Samples of the source that are left out.
    """

    def __init__(
        self,
        *,
        rows: np.ndarray,
        grid_ends: np.ndarray,
        grids: np.ndarray,
        text_tokens: np.ndarray,
        label_tokens: np.ndarray,
        merge_size: int,
        bad: Sequence[BadSample] = (),
    ) -> None:
        self.rows = rows
        self.bad = tuple(bad)
        self._grid_ends = grid_ends
        self._grids = grids
        self._text_tokens = text_tokens
        self._label_tokens = label_tokens
        self._merge_size = merge_size

    @classmethod
    def from_sizes(
        cls,
        rows: Sequence[int],
        sizes: Sequence[SampleSize],
        *,
        merge_size: int,
        bad: Sequence[BadSample] = (),
    ) -> SizeTable:
        """Pack sizes that were measured one by one."""
        grids = [grid for size in sizes for grid in size.grids]
        return cls(
            rows=np.asarray(rows, np.int64),
            grid_ends=np.cumsum([0, *(len(size.grids) for size in sizes)], dtype=np.int64),
            grids=np.asarray(grids, np.int32).reshape(-1, 3),
            text_tokens=np.asarray([size.num_text_tokens for size in sizes], np.int64),
            label_tokens=np.asarray([size.num_label_tokens for size in sizes], np.int64),
            merge_size=merge_size,
            bad=bad,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> SampleSize: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleSize]: ...
    def __getitem__(self, index: int | slice) -> SampleSize | list[SampleSize]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        grids = self._grids[self._grid_ends[index] : self._grid_ends[index + 1]]
        return SampleSize(
            grids=tuple((int(frames), int(rows), int(cols)) for frames, rows, cols in grids),
            num_text_tokens=int(self._text_tokens[index]),
            num_label_tokens=int(self._label_tokens[index]),
            merge_size=self._merge_size,
        )

    def num_tokens(self) -> np.ndarray:
        """``[samples]``, tokens in an LLM row of every sample."""
        patches = np.concatenate([[0], np.cumsum(self._grids.astype(np.int64).prod(axis=1))])
        per_sample = patches[self._grid_ends[1:]] - patches[self._grid_ends[:-1]]
        return self._text_tokens + per_sample // self._merge_size**2

    def without(self, dropped: Sequence[BadSample]) -> SizeTable:
        """The table less some samples, named by their rows, which become bad ones."""
        lost = {sample.row for sample in dropped}
        kept = [i for i, row in enumerate(self.rows.tolist()) if row not in lost]
        return SizeTable.from_sizes(
            self.rows[kept].tolist(),
            [self[i] for i in kept],
            merge_size=self._merge_size,
            bad=(*self.bad, *dropped),
        )

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all.

        Raises:
            DataError: If the file cannot be written.
        """

        def write(file: BinaryIO) -> None:
            np.savez_compressed(
                file,
                rows=self.rows,
                grid_ends=self._grid_ends,
                grids=self._grids,
                text_tokens=self._text_tokens,
                label_tokens=self._label_tokens,
                merge_size=self._merge_size,
                bad=json.dumps([vars(sample) for sample in self.bad]),
            )

        write_atomically(path, write)

    @classmethod
    def load(cls, path: Path) -> SizeTable:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: If the file is missing or damaged.
        """
        try:
            # From memory: numpy keeps the file open until collected, and damage shows here.
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in _ARRAYS}
                merge_size = int(stored["merge_size"])
                bad = [BadSample(**record) for record in json.loads(str(stored["bad"]))]
            if len({len(arrays[n]) for n in ("rows", "text_tokens", "label_tokens")}) != 1:
                raise ValueError("its arrays differ in length")
        except Exception as error:  # a damaged archive raises anything from KeyError to zlib.error
            raise DataError(
                f"The size index {path} is missing or damaged ({error})",
                limit="it is built before it is read",
                remedy="call prepare_data() on one process first, or delete the file",
            ) from error
        return cls(**arrays, merge_size=merge_size, bad=bad)


def index_path(
    folder: Path, source: Source, tokenizer: TextTokenizer, image_rule: ImageRule
) -> Path:
    """Where the index lies: its name changes with the data, the tokenizer and the size rule."""
    digest = short_digest(
        f"{INDEX_VERSION}",
        source.fingerprint(),
        tokenizer.fingerprint(),
        image_rule.fingerprint(),
    )
    return folder / f"sizes-{digest}.npz"


def build_index(
    path: Path,
    source: Source,
    tokenizer: TextTokenizer,
    image_rule: ImageRule,
    *,
    skip_bad: bool,
    progress: bool = True,
) -> SizeTable:
    """Load the index, or measure all samples and cache it.

    Only headers of images are read; nothing is decoded.

    Args:
        path: Where the cache lies, see :func:`index_path`.
        source: The samples.
        tokenizer: Counts tokens.
        image_rule: Counts patches.
        skip_bad: Whether to leave out samples that cannot be used, rather than raise.
        progress: Whether to show a progress bar while measuring.

    Raises:
        SampleError: At the first sample that cannot be used, unless they are skipped.
        DataError: If the cache cannot be written.
    """
    if path.exists():
        try:
            table = SizeTable.load(path)
        except DataError as error:
            _log.warning("%s. Measuring anew.", error.value)
        else:
            if table.bad and not skip_bad:
                raise table.bad[0].error()
            return table
    rows: list[int] = []
    sizes: list[SampleSize] = []
    bad: list[BadSample] = []
    for row in _counted(len(source), progress):
        try:
            sizes.append(measure_sample(source, row, tokenizer, image_rule))
            rows.append(row)
        except SampleError as error:
            if not skip_bad:
                raise
            bad.append(BadSample(row, error.value, error.limit, error.remedy))
    table = SizeTable.from_sizes(rows, sizes, merge_size=image_rule.merge_size, bad=bad)
    table.save(path)
    return table


def _counted(total: int, progress: bool) -> Iterator[int]:
    with progress_bar("Measuring samples", total, show=progress) as advance:
        for i in range(total):
            yield i
            advance()
