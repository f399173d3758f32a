from __future__ import annotations

import random

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from lightning_entrain.errors import ConfigError, SampleError
from lightning_entrain.workload.image_rule import ImageRule

RULES = [
    ImageRule(),
    ImageRule(max_pixels=200_704),
    ImageRule(min_pixels=28 * 28 * 16, max_pixels=28 * 28 * 20),
    ImageRule(patch_size=16, merge_size=1, min_pixels=1, max_pixels=16 * 16 * 9),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sizes_equal_those_of_transformers(rule: ImageRule) -> None:
    state = random.Random(0)
    sizes = [(state.randint(1, 60), state.randint(1, 60)) for _ in range(500)]
    sizes += [(state.randint(1, 3000), state.randint(30, 3000)) for _ in range(500)]
    # Halves are rounded to even, as Python does and C does not.
    sizes += [(14, 42), (42, 70), (70, 98), (1, 200), (200, 1)]
    for height, width in sizes:
        if max(height, width) / min(height, width) > 200:
            continue
        expected = smart_resize(height, width, rule.factor, rule.min_pixels, rule.max_pixels)
        assert rule.resized(height, width) == expected
        grid = rule.grid(height, width)
        assert grid == (1, expected[0] // rule.patch_size, expected[1] // rule.patch_size)
        assert grid[1] % rule.merge_size == grid[2] % rule.merge_size == 0


@pytest.mark.parametrize(
    ("height", "width", "words"),
    [
        (0, 10, ["10x0", "at least 1x1"]),
        (10, 2001, ["2001x10", "ratio of 200", "at most 200"]),
        (10_001, 10_000, ["100010000", "at most 100000000", "max_source_pixels"]),
    ],
)
def test_an_absurd_size_is_named_with_its_limit(height: int, width: int, words: list[str]) -> None:
    with pytest.raises(SampleError) as caught:
        ImageRule().grid(height, width)
    for word in [*words, "on_bad_sample=skip"]:
        assert word in str(caught.value)


def test_a_ratio_of_exactly_200_is_allowed() -> None:
    assert ImageRule().grid(10, 2000)[0] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"patch_size": 0},
        {"min_pixels": 5000, "max_pixels": 4000},
        {"min_pixels": 1, "max_pixels": 783},
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ImageRule(**options)


def test_the_fingerprint_changes_with_every_option() -> None:
    names = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    prints = {ImageRule(**{name: getattr(ImageRule(), name) + 1}).fingerprint() for name in names}
    assert len(prints | {ImageRule().fingerprint()}) == len(names) + 1
