"""How an image's pixels become patches: the Qwen2.5-VL size rule. Pure: headers in, grids out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from lightning_entrain.errors import ConfigError, SampleError
from lightning_entrain.workload.sizes import Grid

MAX_ASPECT_RATIO = 200
"""Longest side over shortest side beyond which Qwen2.5-VL refuses an image."""


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """The rule by which an image is resized and cut into patches.

    Both sides become multiples of ``patch_size * merge_size``; the area is brought between
    ``min_pixels`` and ``max_pixels``; the aspect ratio is kept as closely as that allows.

    Attributes:
        patch_size: Side of a patch in pixels.
        merge_size: Side, in patches, of the square that becomes one vision token.
        temporal_patch_size: Frames in a patch; a still image is repeated to fill it.
        min_pixels: Least area after resizing, in pixels.
        max_pixels: Largest area after resizing, in pixels.
        max_source_pixels: Largest area an image file may claim before resizing.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_source_pixels: int = 100_000_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}", limit="at least 1")
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"min_pixels is {self.min_pixels} and max_pixels is {self.max_pixels}",
                limit="min_pixels <= max_pixels",
                remedy="raise max_pixels or lower min_pixels",
            )
        if self.max_pixels < self.factor**2:
            raise ConfigError(
                f"max_pixels is {self.max_pixels}",
                limit=f"at least {self.factor}x{self.factor} pixels, one vision token",
                remedy="raise max_pixels",
            )

    @property
    def factor(self) -> int:
        """Pixels along one side of a vision token."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values in one patch: 3 colours x frames x rows x columns."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels after resizing.

        Args:
            height: Height of the image file, in pixels.
            width: Width of the image file, in pixels.

        Raises:
            SampleError: If the image has no area, too much of it, or is too elongated.
        """
        self._check(height, width)
        factor = self.factor
        new_height = round(height / factor) * factor
        new_width = round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width

    def grid(self, height: int, width: int) -> Grid:
        """Patch grid (frames, rows, columns) of a still image.

        Args:
            height: Height of the image file, in pixels.
            width: Width of the image file, in pixels.

        Raises:
            SampleError: As :meth:`resized`.
        """
        new_height, new_width = self.resized(height, width)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def fingerprint(self) -> str:
        """Text that changes when the rule does."""
        return ",".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))

    def _check(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise SampleError(
                f"An image is {width}x{height} pixels",
                limit="at least 1x1 pixel",
                remedy="remove the sample, or set on_bad_sample=skip",
            )
        if height * width > self.max_source_pixels:
            raise SampleError(
                f"An image is {width}x{height} = {width * height} pixels",
                limit=f"at most {self.max_source_pixels} pixels",
                remedy="shrink or remove it, raise max_source_pixels, or set on_bad_sample=skip",
            )
        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise SampleError(
                f"An image is {width}x{height} pixels, an aspect ratio of {ratio:.0f}",
                limit=f"at most {MAX_ASPECT_RATIO}",
                remedy="crop or remove it, or set on_bad_sample=skip",
            )
