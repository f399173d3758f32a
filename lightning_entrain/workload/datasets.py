"""Seeded generators of sample sizes that follow four public datasets.

A plan needs only sizes, and the datasets of the paper's evaluation (Entrain, section 6, arXiv
2605.27918) need not be downloaded to get them. What each law rests on:

- ``cocoqa``: text from all question groups of COCO-QA; image sizes counted in COCO val2017.
- ``chartqa``: image sizes and text measured on 2,551 image groups; a fifth is human-written, the
  rest has turns stretched so that the whole has the published 1.549 turns per image.
- ``llava150k``: text means per kind of sample from the published file sizes, spread of the
  detailed and reasoning kinds measured on 30 samples each; the number of turns of conversations
  and their spread are assumed. Image sizes of COCO val2017 stand in for train2017.
- ``synthchartnet``: mean text from the published totals, spread assumed; the image sizes are
  calibrated against the mean file size of one published shard, not measured.

Text tokens are those of the Llama-3 tokenizer, with the prompt wording of FineVision added so that
means equal the totals published in arXiv 2510.17269.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload import _image_sizes
from lightning_entrain.workload.tables import IntArray, SizeTable

QWEN_FACTOR = 28
QWEN_MIN_PIXELS = 56 * 56
QWEN_MAX_PIXELS = 16384 * QWEN_FACTOR**2


@dataclass(frozen=True, kw_only=True)
class RawSizes:
    """Image sizes in pixels and text tokens, before any model's image rule.

    Attributes:
        image_w: Width of each sample's image, ``[num_samples]``.
        image_h: Height, ``[num_samples]``.
        num_text_tokens: Text tokens, ``[num_samples]``.
    """

    image_w: IntArray
    image_h: IntArray
    num_text_tokens: IntArray


def dataset_names() -> tuple[str, ...]:
    """Names that :func:`sample_sizes` knows."""
    return tuple(_GENERATORS)


def dataset_length(name: str) -> int:
    """Number of samples of the published dataset."""
    _check_name(name)
    return _LENGTHS[name]


def sample_sizes(name: str, num_samples: int, seed: int = 0) -> SizeTable:
    """Sizes of ``num_samples`` samples of a dataset under Qwen2.5-VL's image rule.

    Args:
        name: One of :func:`dataset_names`.
        num_samples: Rows of the table.
        seed: Equal seeds give equal tables.

    Raises:
        ConfigError: If the name is unknown or ``num_samples`` is below 1.
    """
    raw = raw_sizes(name, num_samples, seed)
    rows, columns = qwen_grid(raw.image_w, raw.image_h)
    return SizeTable.from_single_images(rows, columns, raw.num_text_tokens)


def raw_sizes(name: str, num_samples: int, seed: int = 0) -> RawSizes:
    """Image sizes in pixels and text tokens of samples; arguments as :func:`sample_sizes`."""
    _check_name(name)
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples}", limit="at least 1")
    generator = np.random.default_rng([seed, *name.encode()])
    width, height, text = _GENERATORS[name](generator, num_samples)
    return RawSizes(image_w=width, image_h=height, num_text_tokens=text)


def qwen_grid(
    image_w: IntArray,
    image_h: IntArray,
    *,
    min_pixels: int = QWEN_MIN_PIXELS,
    max_pixels: int = QWEN_MAX_PIXELS,
) -> tuple[IntArray, IntArray]:
    """Patch rows and columns of images under Qwen2.5-VL's rule, for many images at once.

    The same numbers as :class:`lightning_entrain.workload.image_rule.ImageRule`.

    Args:
        image_w: Widths in pixels, ``[num_images]``, at least 1.
        image_h: Heights in pixels, ``[num_images]``, at least 1.
        min_pixels: Least area after resizing.
        max_pixels: Largest area after resizing.
    """
    factor = QWEN_FACTOR
    height, width = (np.round(side / factor) * factor for side in (image_h, image_w))
    large, small = height * width > max_pixels, height * width < min_pixels
    shrink = np.sqrt(image_h * image_w / max_pixels)
    grow = np.sqrt(min_pixels / (image_h * image_w))

    def resized(side: IntArray, rounded: NDArray[np.float64]) -> IntArray:
        shrunk = np.maximum(factor, np.floor(side / shrink / factor) * factor)
        grown = np.ceil(side * grow / factor) * factor
        pixels = np.where(large, shrunk, np.where(small, grown, rounded))
        return (pixels / 14).astype(np.int64)

    return resized(image_h, height), resized(image_w, width)


_Columns = tuple[IntArray, IntArray, IntArray]
_Generator = Callable[[np.random.Generator, int], _Columns]


def _check_name(name: str) -> None:
    if name not in _GENERATORS:
        raise ConfigError(
            f"data is {name!r}",
            limit=f"one of {', '.join(_GENERATORS)}",
            remedy="or give your own table with data.sizes=FILE",
        )


@lru_cache(maxsize=4)
def _size_table(name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    text: str = getattr(_image_sizes, name.upper())
    sizes, counts = [], []
    for entry in text.split():
        size, _, count = entry.partition("*")
        width, height = size.split("x")
        sizes.append((int(width), int(height)))
        counts.append(int(count or 1))
    weights = np.asarray(counts, dtype=np.float64)
    return np.asarray(sizes, dtype=np.int64), weights / weights.sum()


def _draw_images(
    generator: np.random.Generator, name: str, num_samples: int
) -> tuple[IntArray, IntArray]:
    sizes, shares = _size_table(name)
    chosen = generator.choice(len(sizes), size=num_samples, p=shares)
    return sizes[chosen, 0], sizes[chosen, 1]


def _draw_text(
    generator: np.random.Generator, turns: IntArray, mu: float, sigma: float, offset: float
) -> IntArray:
    """Sum over each sample's turns of a log-normal token count plus a constant."""
    per_turn = generator.lognormal(mu, sigma, size=int(turns.sum())) + offset
    starts = np.concatenate([[0], np.cumsum(turns)[:-1]])
    return np.maximum(1, np.round(np.add.reduceat(per_turn, starts))).astype(np.int64)


def _draw_turns(
    generator: np.random.Generator, shares: tuple[float, ...], num_samples: int
) -> IntArray:
    weights = np.asarray(shares) / sum(shares)
    return generator.choice(np.arange(1, len(shares) + 1), size=num_samples, p=weights)


def _log_normal(mean: float, cv: float) -> tuple[float, float]:
    """Parameters of the log-normal law with this mean and coefficient of variation."""
    variance = math.log(1 + cv**2)
    return math.log(mean) - variance / 2, math.sqrt(variance)


def _cocoqa(generator: np.random.Generator, num_samples: int) -> _Columns:
    width, height = _draw_images(generator, "coco", num_samples)
    shares = (0.5504, 0.2776, 0.1143, 0.04, 0.0127, 0.0035, 0.001, 0.0005)
    turns = _draw_turns(generator, shares, num_samples)
    return width, height, _draw_text(generator, turns, 2.312, 0.228, 6.75)


def _chartqa(generator: np.random.Generator, num_samples: int) -> _Columns:
    human = generator.random(num_samples) < 0.2
    columns = np.zeros((3, num_samples), dtype=np.int64)
    kinds = (
        (human, "chartqa_human", (0.012, 0.988), 2.701, 0.249),
        (~human, "chartqa_augmented", (0.66, 0.285, 0.05, 0.005), 2.885, 0.208),
    )
    for mask, sizes, shares, mu, sigma in kinds:
        count = int(mask.sum())
        if count == 0:
            continue
        columns[0, mask], columns[1, mask] = _draw_images(generator, sizes, count)
        turns = _draw_turns(generator, shares, count)
        columns[2, mask] = _draw_text(generator, turns, mu, sigma, 9.4)
    return columns[0], columns[1], columns[2]


def _llava150k(generator: np.random.Generator, num_samples: int) -> _Columns:
    width, height = _draw_images(generator, "coco", num_samples)
    kind = generator.choice(3, size=num_samples, p=(0.367, 0.147, 0.486))
    turns = np.where(kind == 0, 2 + generator.binomial(6, 0.42, size=num_samples), 1)
    text = np.zeros(num_samples, dtype=np.int64)
    for index, (mean, cv) in enumerate(((68.0, 0.9), (131.0, 0.21), (158.0, 0.21))):
        mask = kind == index
        if mask.any():
            text[mask] = _draw_text(generator, turns[mask], *_log_normal(mean, cv), 0.0)
    return width, height, text


def _synthchartnet(generator: np.random.Generator, num_samples: int) -> _Columns:
    width = np.clip(generator.normal(950.0, 215.0, size=num_samples), 400.0, 1800.0)
    aspect = np.clip(generator.lognormal(0.20, 0.24, size=num_samples), 0.6, 2.5)
    mu = math.log(135.0) - 0.32**2 / 2
    text = np.clip(generator.lognormal(mu, 0.32, size=num_samples), 40.0, 1024.0)
    columns = (width, width / aspect, text)
    rounded = [np.round(column).astype(np.int64) for column in columns]
    return rounded[0], rounded[1], rounded[2]


_GENERATORS: dict[str, _Generator] = {
    "synthchartnet": _synthchartnet,
    "chartqa": _chartqa,
    "cocoqa": _cocoqa,
    "llava150k": _llava150k,
}
_LENGTHS = {"synthchartnet": 500_000, "chartqa": 18_265, "cocoqa": 46_287, "llava150k": 157_710}
