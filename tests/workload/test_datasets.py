"""Seeded sizes of the public datasets."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.datasets import (
    dataset_length,
    dataset_names,
    qwen_grid,
    raw_sizes,
    sample_sizes,
)
from lightning_entrain.workload.image_rule import ImageRule

PUBLISHED_TEXT = {
    "cocoqa": (1_136_238 + 212_480) / 46_287,
    "chartqa": (625_569 + 134_793) / 18_265,
    "llava150k": (4_412_600 + 28_719_278) / 157_710,
    "synthchartnet": (2_169_240 + 67_392_223) / 500_000,
}


@pytest.mark.parametrize("name", PUBLISHED_TEXT)
def test_mean_text_is_the_published_one(name: str) -> None:
    table = sample_sizes(name, 30_000, 0)
    assert table.num_text_tokens.mean() == pytest.approx(PUBLISHED_TEXT[name], rel=0.035)
    assert table.num_text_tokens.min() >= 1


@pytest.mark.parametrize("name", dataset_names())
def test_seeded(name: str) -> None:
    first, again, other = (sample_sizes(name, 200, seed) for seed in (7, 7, 8))
    assert (first.num_patches == again.num_patches).all()
    assert (first.num_text_tokens == again.num_text_tokens).all()
    assert (first.num_patches != other.num_patches).any()
    assert dataset_length(name) > 10_000


def test_measured_image_sizes() -> None:
    """Means of the real images: 1,394 patches on COCO-QA's test, 2,118 and 2,625 on ChartQA's."""
    assert sample_sizes("cocoqa", 20_000).num_patches.mean() == pytest.approx(1394, rel=0.02)
    expected = 0.2 * 2118 + 0.8 * 2625
    assert sample_sizes("chartqa", 20_000).num_patches.mean() == pytest.approx(expected, rel=0.02)


def test_workload_ratio_of_llava_is_the_papers() -> None:
    """Patches per LLM token: 2.43 in the paper's figure 5."""
    table = sample_sizes("llava150k", 20_000)
    assert table.num_patches.sum() / table.num_tokens.sum() == pytest.approx(2.43, rel=0.05)


@pytest.mark.parametrize(
    ("width", "height", "rows", "columns"),
    [
        (640, 480, 34, 46),
        (224, 224, 16, 16),
        (28, 28, 4, 4),  # raised to the least number of pixels
        (1, 1, 4, 4),
        (1, 100, 40, 2),
        (8000, 8000, 256, 256),  # lowered to the most
    ],
)
def test_qwen_rule(width: int, height: int, rows: int, columns: int) -> None:
    found = qwen_grid(np.array([width]), np.array([height]))
    assert (int(found[0][0]), int(found[1][0])) == (rows, columns)


def test_the_rule_equals_the_data_modules() -> None:
    generator = np.random.default_rng(0)
    width, height = generator.integers(1, 6000, (2, 500))
    width[:100], height[:100] = generator.integers(1, 80, (2, 100))
    limits = {"min_pixels": 50_000, "max_pixels": 2_000_000}
    rows, columns = qwen_grid(width, height, **limits)
    rule = ImageRule(**limits)
    for index, (w, h) in enumerate(zip(width.tolist(), height.tolist(), strict=True)):
        if max(w, h) < 200 * min(w, h):
            assert rule.grid(h, w) == (1, rows[index], columns[index])


def test_merged_tokens_are_a_quarter() -> None:
    table = sample_sizes("synthchartnet", 500)
    assert (table.num_patches == 4 * table.num_vision_tokens).all()


def test_bad_names_and_counts() -> None:
    with pytest.raises(ConfigError, match="'imagenet'"):
        sample_sizes("imagenet", 10)
    with pytest.raises(ConfigError, match="num_samples is 0"):
        raw_sizes("chartqa", 0)
