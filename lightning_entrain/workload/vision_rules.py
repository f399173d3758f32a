"""Images to patches for many images at once, by a model's rule."""

from __future__ import annotations

import math

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.datasets import RawSizes, qwen_grid
from lightning_entrain.workload.shapes import ViewRule
from lightning_entrain.workload.tables import IntArray, SizeTable


def table_from_raw(raw: RawSizes, rule: ViewRule) -> SizeTable:
    """Sizes of samples with one image each, under a model's image rule.

    Args:
        raw: Image sizes in pixels and text tokens; an image of width 0 means no image.
        rule: The model's rule.
    """
    present = (raw.image_w > 0) & (raw.image_h > 0)
    if rule.kind == "qwen":
        width, height = np.maximum(raw.image_w, 1), np.maximum(raw.image_h, 1)
        limits = {"min_pixels": rule.min_pixels, "max_pixels": rule.max_pixels}
        rows, columns = qwen_grid(width, height, **limits)
        return SizeTable.from_single_images(
            rows * present, columns * present, raw.num_text_tokens, merge_size=rule.merge_size
        )
    if rule.kind not in ("fixed", "tiles"):
        raise ConfigError(f"view_rule.kind is {rule.kind!r}", limit="qwen, fixed or tiles")
    side = rule.image_size // rule.patch_size
    views = np.ones_like(raw.image_w) if rule.kind == "fixed" else _num_views(raw, rule)
    views = views * present
    patches = side**2
    tokens = rule.tokens_per_view or patches // rule.merge_size**2
    return SizeTable(
        num_patches=views * patches,
        num_vision_tokens=views * tokens,
        num_text_tokens=raw.num_text_tokens,
        num_images=views,
        full_pairs=views * patches**2,
        window_pairs=views * patches**2,
    )


def _num_views(raw: RawSizes, rule: ViewRule) -> IntArray:
    """Tiles plus an overview where there is more than one tile."""
    if rule.longest_edge:
        scale = rule.longest_edge / np.maximum(np.maximum(raw.image_w, raw.image_h), 1)
        rows = np.ceil(np.round(raw.image_h * scale) / rule.image_size)
        columns = np.ceil(np.round(raw.image_w * scale) / rule.image_size)
        tiles = np.maximum(1, rows * columns).astype(np.int64)
    else:
        tiles = _best_grid(raw, rule)
    return tiles + (tiles > 1)


def _best_grid(raw: RawSizes, rule: ViewRule) -> IntArray:
    """Tiles of the grid whose aspect ratio is nearest; the larger one when the image fills half."""
    grids = [
        (columns, rows)
        for columns in range(1, rule.max_tiles + 1)
        for rows in range(1, rule.max_tiles + 1)
        if rule.min_tiles <= columns * rows <= rule.max_tiles
    ]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    aspect = np.maximum(raw.image_w, 1) / np.maximum(raw.image_h, 1)
    area = raw.image_w.astype(np.float64) * raw.image_h
    best = np.full(len(aspect), math.inf)
    tiles = np.ones(len(aspect), dtype=np.int64)
    for columns, rows in grids:
        distance = np.abs(aspect - columns / rows)
        count = columns * rows
        fills = area > 0.5 * rule.image_size**2 * count
        take = (distance < best) | ((distance == best) & fills)
        tiles = np.where(take, count, tiles)
        best = np.where(take, distance, best)
    return tiles
