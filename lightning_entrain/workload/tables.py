"""Sizes of many samples at once, as arrays. Everything a cost model needs to know of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.sizes import SampleSize

IntArray = NDArray[np.int64]

WINDOW = 8
"""Side, in patches, of a window of Qwen2.5-VL's window attention."""


@dataclass(frozen=True, kw_only=True)
class SizeTable:
    """Sizes of samples; every field is an int64 array of shape ``[num_samples]``.

    Attention never crosses an image in the encoder nor a sample in the LLM, so its cost is not a
    function of the microbatch's length: it needs the sums of squares kept here.

    Attributes:
        num_patches: Rows in the encoder.
        num_vision_tokens: Rows the encoder returns, after merging.
        num_text_tokens: The other rows in the LLM.
        num_images: Images of the sample.
        full_pairs: Sum over the sample's images of (patches of the image) squared.
        window_pairs: The same over the attention windows of the images.
    """

    num_patches: IntArray
    num_vision_tokens: IntArray
    num_text_tokens: IntArray
    num_images: IntArray
    full_pairs: IntArray
    window_pairs: IntArray

    def __post_init__(self) -> None:
        for field in fields(self):
            column = np.asarray(getattr(self, field.name), dtype=np.int64)
            object.__setattr__(self, field.name, column)
        if len({len(getattr(self, field.name)) for field in fields(self)}) != 1:
            raise ConfigError("The columns of a size table differ in length", limit="one row each")

    def __len__(self) -> int:
        return len(self.num_patches)

    @property
    def num_tokens(self) -> IntArray:
        """Rows of each sample in the LLM."""
        return self.num_vision_tokens + self.num_text_tokens

    def take(self, indices: ArrayLike) -> SizeTable:
        """Rows at ``indices`` (integers, a slice's values or a boolean mask)."""
        chosen = np.asarray(indices)
        return SizeTable(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @classmethod
    def from_single_images(
        cls,
        grid_rows: ArrayLike,
        grid_columns: ArrayLike,
        num_text_tokens: ArrayLike,
        *,
        merge_size: int = 2,
        window: int = WINDOW,
    ) -> SizeTable:
        """One image per sample, given its patch grid.

        Args:
            grid_rows: Patch rows of each sample's image, ``[num_samples]``; 0 means no image.
            grid_columns: Patch columns, ``[num_samples]``.
            num_text_tokens: Text tokens, ``[num_samples]``.
            merge_size: Side of the square of patches that becomes one vision token.
            window: Side of an attention window in patches.
        """
        rows = np.asarray(grid_rows, dtype=np.int64)
        columns = np.asarray(grid_columns, dtype=np.int64)
        patches = rows * columns
        return cls(
            num_patches=patches,
            num_vision_tokens=patches // merge_size**2,
            num_text_tokens=np.asarray(num_text_tokens, dtype=np.int64),
            num_images=(patches > 0).astype(np.int64),
            full_pairs=patches**2,
            window_pairs=window_pairs(rows, columns, window),
        )

    @classmethod
    def from_sizes(cls, sizes: Sequence[SampleSize], *, window: int = WINDOW) -> SizeTable:
        """Table of the given samples, in their order; a grid's frames are counted as images."""
        # All images of all samples at once: this runs for every batch that is trained.
        counts = _column(len(size.grids) for size in sizes)
        flat = [number for size in sizes for grid in size.grids for number in grid]
        frames, rows, columns = np.array(flat, dtype=np.int64).reshape(-1, 3).T
        stops = np.cumsum(counts)

        def per_sample(per_image: IntArray) -> IntArray:
            until = np.concatenate([[0], np.cumsum(per_image)])
            found: IntArray = until[stops] - until[stops - counts]
            return found

        areas = rows * columns
        patches = per_sample(frames * areas)
        return cls(
            num_patches=patches,
            num_vision_tokens=patches // _column(size.merge_size**2 for size in sizes),
            num_text_tokens=_column(size.num_text_tokens for size in sizes),
            num_images=per_sample(frames),
            full_pairs=per_sample(frames * areas**2),
            window_pairs=per_sample(frames * window_pairs(rows, columns, window)),
        )


def window_pairs(rows: IntArray, columns: IntArray, window: int) -> IntArray:
    """Query-key pairs of window attention on grids of ``rows`` x ``columns`` patches.

    Windows at the lower and right edge are cut off, as Qwen2.5-VL does. The sum of squares of all
    window areas is the product of the sums of squares of the window heights and widths.

    Args:
        rows: Patch rows per image, ``[num_images]``.
        columns: Patch columns per image, ``[num_images]``.
        window: Side of a full window in patches.

    Returns:
        Pairs per image, ``[num_images]``.
    """

    def squares(length: IntArray) -> IntArray:
        result: IntArray = (length // window) * window**2 + (length % window) ** 2
        return result

    return squares(rows) * squares(columns)


def _column(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
