"""The size of a sample, known before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Grid = tuple[int, int, int]
"""Patches of one image: (frames, rows, columns), before merging."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSize:
    """What every rank knows of a sample without loading it.

    Attributes:
        grids: One patch grid (frames, rows, columns) per image, in the order the images appear.
        num_text_tokens: Tokens of the sample's LLM row that are not vision tokens.
        num_label_tokens: Positions of that row that have a label (after the shift by one).
        merge_size: Side of the square of patches that becomes one vision token.
    """

    grids: tuple[Grid, ...]
    num_text_tokens: int
    num_label_tokens: int
    merge_size: int = 2

    @property
    def has_images(self) -> bool:
        """Whether the encoder has work with this sample."""
        return bool(self.grids)

    @property
    def num_patches(self) -> int:
        """Rows this sample takes in an encoder microbatch."""
        return sum(frames * rows * columns for frames, rows, columns in self.grids)

    @property
    def num_vision_tokens(self) -> int:
        """Rows the encoder returns for this sample (after merging)."""
        return self.num_patches // self.merge_size**2

    @property
    def num_tokens(self) -> int:
        """Rows this sample takes in an LLM microbatch: text and vision tokens."""
        return self.num_text_tokens + self.num_vision_tokens


def total_label_tokens(sizes: Iterable[SampleSize]) -> int:
    """Number of label tokens in a set of samples: the divisor of the loss."""
    return sum(size.num_label_tokens for size in sizes)
