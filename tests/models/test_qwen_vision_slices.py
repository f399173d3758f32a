"""Any slicing of the Qwen2.5 vision transformer equals Hugging Face's own forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.protocol import EncoderPacking
from lightning_entrain.models.qwen_vision import QwenVisionEncoder, vision_layout

from .helpers import relative

DEPTH = 4
# one merged square; smaller than a window; several windows with ragged edges; long; a video
GRIDS = ((1, 2, 2), (1, 6, 4), (1, 20, 34), (1, 2, 60), (2, 8, 18))
CUTS = [
    (0, *inner, DEPTH)
    for size in range(DEPTH)
    for inner in itertools.combinations(range(1, DEPTH), size)
]


def make_model(attention: str = "sdpa") -> Qwen2_5_VisionTransformerPretrainedModel:
    config = Qwen2_5_VLVisionConfig(
        depth=DEPTH,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=24,
        fullatt_block_indexes=[1, 3],
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    return Qwen2_5_VisionTransformerPretrainedModel(config)


def run_slices(encoder, pixels, packing, cuts):
    hidden = pixels
    for start, stop in itertools.pairwise(cuts):
        hidden = encoder.forward_stage(hidden, packing, start=start, stop=stop)
    return hidden


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_slices_equal_whole_and_image_by_image(cuts):
    model = make_model()
    encoder = QwenVisionEncoder(model)
    packing = EncoderPacking(GRIDS)
    pixels = torch.randn(packing.num_patches, encoder.patch_dim)
    found = run_slices(encoder, pixels, packing, cuts)
    packed = model(pixels, torch.tensor(GRIDS)).pooler_output
    assert relative(found, packed) < 1e-6
    lengths = [t * h * w for t, h, w in GRIDS]
    single = [
        model(part, torch.tensor([grid])).pooler_output
        for part, grid in zip(pixels.split(lengths), GRIDS, strict=True)
    ]
    assert relative(found, torch.cat(single)) < 1e-6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_equal_whole(attention):
    model = make_model(attention)
    encoder = QwenVisionEncoder(model)
    packing = EncoderPacking(GRIDS)
    pixels = torch.randn(packing.num_patches, encoder.patch_dim)
    weight = torch.randn(packing.num_patches // 4, encoder.output_size)
    (model(pixels, torch.tensor(GRIDS)).pooler_output * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (run_slices(encoder, pixels, packing, (0, 1, 3, 4)) * weight).sum().backward()
    assert set(expected) == {name for name, _ in encoder.named_parameters()}
    for name, parameter in encoder.named_parameters():
        assert relative(parameter.grad, expected[name]) < 1e-5, name


grids = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(1, 20)).map(
        lambda g: (g[0], 2 * g[1], 2 * g[2])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(grids=grids, window=st.sampled_from([56, 112, 224]))
def test_layout_equals_hugging_face(grids, window):
    layout = vision_layout(tuple(grids), 2, window // 2 // 14)
    tensor = torch.tensor(grids)
    order, bounds = get_vision_window_index(
        tensor, spatial_merge_size=2, window_size=window, patch_size=14
    )
    positions = get_vision_position_ids(tensor, 2).reshape(-1, 4, 2)[order].reshape(-1, 2)
    assert layout.window_order.tolist() == order.tolist()
    assert layout.window_bounds.tolist() == bounds.tolist()
    assert layout.frame_bounds.tolist() == get_vision_cu_seqlens(tensor).tolist()
    assert layout.position_ids.tolist() == positions.tolist()
    assert layout.window_order[layout.reverse_order].tolist() == list(range(len(order)))


def test_state_dict_names_are_hugging_face_names():
    model = make_model()
    assert list(QwenVisionEncoder(model).state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("start", [0, 2])
def test_wrong_number_of_patches(start):
    encoder = QwenVisionEncoder(make_model())
    columns = encoder.patch_dim if start == 0 else encoder.hidden_size
    with pytest.raises(RuntimeMismatchError, match=r"got 23 patches.*24 patches"):
        encoder.forward_stage(
            torch.zeros(23, columns), EncoderPacking(((1, 6, 4),)), start=start, stop=4
        )


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5), (0, 4, 4), (1, 0, 4)])
def test_grid_that_cannot_be_merged(grid):
    with pytest.raises(RuntimeMismatchError, match="multiples of 2"):
        vision_layout((grid,), 2, 4)


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (-1, 2), (0, 5), (3, 1)])
def test_range_outside_the_layers(start, stop):
    encoder = QwenVisionEncoder(make_model())
    with pytest.raises(ConfigError, match="4 layers"):
        encoder.forward_stage(
            torch.zeros(24, 32), EncoderPacking(((1, 6, 4),)), start=start, stop=stop
        )


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match=r"Qwen2.5-VL"):
        QwenVisionEncoder(_Other())


class _Other(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.config = object()
