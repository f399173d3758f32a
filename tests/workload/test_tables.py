"""Size tables, image rules and loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.datasets import RawSizes
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.layers import AttentionPattern
from lightning_entrain.workload.shapes import ViewRule
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable, window_pairs
from lightning_entrain.workload.vision_rules import table_from_raw

MODELS = Path(__file__).parents[2] / "conf" / "planning" / "model"


def raw(*sizes: tuple[int, int], text: int = 10) -> RawSizes:
    columns = np.array(sizes).T
    return RawSizes(
        image_w=columns[0], image_h=columns[1], num_text_tokens=np.full(len(sizes), text)
    )


@pytest.mark.parametrize("grid", [(1, 16, 16), (1, 34, 46), (1, 2, 2), (1, 10, 22), (1, 8, 64)])
def test_window_pairs_equal_the_models_windows(grid: tuple[int, int, int]) -> None:
    import torch

    config = qwen.Qwen2_5_VLVisionConfig()
    _, lengths = qwen.get_vision_window_index(
        torch.tensor([grid]), spatial_merge_size=2, window_size=112, patch_size=14, kwargs={}
    )
    windows = torch.unique_consecutive(lengths).diff()
    expected = int((windows.long() ** 2).sum())
    assert config.window_size == 112
    assert int(window_pairs(np.array([grid[1]]), np.array([grid[2]]), 8)[0]) == expected


def test_from_sizes_equals_single_images() -> None:
    sizes = [
        SampleSize(grids=((1, 16, 20),), num_text_tokens=7, num_label_tokens=3),
        SampleSize(grids=(), num_text_tokens=9, num_label_tokens=9),
        SampleSize(grids=((1, 4, 4), (2, 8, 10)), num_text_tokens=1, num_label_tokens=1),
    ]
    table = SizeTable.from_sizes(sizes)
    single = SizeTable.from_single_images([16, 0], [20, 0], [7, 9])
    for name in ("num_patches", "num_vision_tokens", "num_tokens", "full_pairs", "window_pairs"):
        assert (getattr(table, name)[:2] == getattr(single, name)).all()
    assert table.num_images.tolist() == [1, 0, 3]
    assert table.full_pairs[2] == 16**2 + 2 * 80**2
    assert table.take([2]).num_patches.tolist() == [176]


def test_columns_must_have_equal_length() -> None:
    with pytest.raises(ConfigError, match="differ in length"):
        SizeTable(
            num_patches=[1],
            num_vision_tokens=[1, 2],
            num_text_tokens=[1],
            num_images=[1],
            full_pairs=[1],
            window_pairs=[1],
        )


def test_fixed_views_ignore_the_image() -> None:
    config = yaml.safe_load((MODELS / "llava1_5_7b.yaml").read_text())
    shape = model_shape(config)
    table = table_from_raw(raw((100, 900), (800, 600), (0, 0)), shape.view_rule)
    assert table.num_patches.tolist() == [576, 576, 0]
    load = shape.encoder.load(table)
    assert load.rows.tolist() == [577, 577, 0]  # with the class token
    assert load.pairs[AttentionPattern.FULL].tolist() == [577**2, 577**2, 0]
    assert load.merged.tolist() == [576, 576, 0]


def test_gemma_pools_to_256_tokens() -> None:
    config = yaml.safe_load((MODELS / "gemma3_4b.yaml").read_text())
    shape = model_shape(config)
    table = table_from_raw(raw((640, 480)), shape.view_rule)
    assert (table.num_patches[0], table.num_vision_tokens[0]) == (4096, 256)
    pairs = shape.llm.load(SizeTable.from_single_images([0], [0], [3000])).pairs
    assert pairs[AttentionPattern.SLIDING][0] == 3000**2 - 1976**2


@pytest.mark.parametrize(
    ("size", "views"), [((448, 448), 1), ((900, 448), 3), ((1344, 900), 7), ((448, 1800), 5)]
)
def test_internvl_tiles(size: tuple[int, int], views: int) -> None:
    config = yaml.safe_load((MODELS / "internvl3_2b.yaml").read_text())
    table = table_from_raw(raw(size), model_shape(config).view_rule)
    assert table.num_images[0] == views
    assert table.num_vision_tokens[0] == 256 * views


def test_smolvlm_tiles_by_longest_edge() -> None:
    config = yaml.safe_load((MODELS / "smolvlm2_2b.yaml").read_text())
    table = table_from_raw(raw((1536, 1152)), model_shape(config).view_rule)
    assert table.num_images[0] == 4 * 3 + 1
    assert table.num_vision_tokens[0] == 81 * 13


def test_unknown_rule() -> None:
    with pytest.raises(ConfigError, match="spiral"):
        table_from_raw(raw((10, 10)), ViewRule(kind="spiral"))


def test_packed_load_is_the_sum_over_samples() -> None:
    table = SizeTable.from_single_images([16, 20], [16, 10], [5, 50])
    shape = model_shape(yaml.safe_load((MODELS / "qwen2_5vision_llama3_1b.yaml").read_text()))
    packed = shape.llm.load(table).sum()
    assert packed.rows[0] == table.num_tokens.sum()
    assert packed.pairs[AttentionPattern.CAUSAL][0] == (table.num_tokens**2).sum()
    assert packed.pairs[AttentionPattern.CAUSAL][0] < packed.rows[0] ** 2
