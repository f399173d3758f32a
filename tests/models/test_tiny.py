"""Models from configs: sizes, seeds, option checks."""

from __future__ import annotations

import inspect

import pytest
import torch
from omegaconf import OmegaConf

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.projector import MlpProjector
from lightning_entrain.models.tiny import nano_vlm, tiny_vlm, vlm_from_configs

VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 20,
    "fullatt_block_indexes": [1],
}
TEXT = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "tie_word_embeddings": False,
}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes():
    assert 1_000_000 < num_parameters(tiny_vlm()) < 5_000_000
    assert 10_000 < num_parameters(nano_vlm()) < 100_000
    assert tiny_vlm().tied_parameters() == ()
    assert (tiny_vlm().encoder.num_layers, tiny_vlm(llm_layers=7).llm.num_layers) == (4, 7)


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = nano_vlm(seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(100)
    two, other = nano_vlm(seed=5).state_dict(), nano_vlm(seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["llm.lm_head.weight"], other["llm.lm_head.weight"])
    assert not torch.equal(one["encoder.merger.mlp.0.weight"], other["encoder.merger.mlp.0.weight"])


def test_arguments_are_plain_types():
    for function in (tiny_vlm, nano_vlm):
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation in ("int", "str", "bool")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_hidden_size": 100, "encoder_heads": 3}, "encoder_hidden_size is 100"),
        ({"encoder_hidden_size": 24, "encoder_heads": 4}, "multiple of 4"),
        ({"llm_hidden_size": 50, "llm_heads": 10}, "llm_hidden_size is 50"),
        ({"llm_key_value_heads": 4}, "divisor of llm_heads, 6"),
        ({"llm_layers": 0}, "llm_layers is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        tiny_vlm(**options)


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_configs_given_as_mappings(wrap):
    model = vlm_from_configs(wrap(VISION), wrap(TEXT), image_token_id=0)
    assert model.llm.config.model_type == "qwen3"
    assert model.encoder.config.fullatt_block_indexes == [1]
    assert isinstance(model.projector, MlpProjector)


def test_projector_option():
    fitting = {**VISION, "out_hidden_size": 24}
    for option, expected in (("auto", False), ("none", False), ("mlp", True)):
        model = vlm_from_configs(fitting, TEXT, image_token_id=0, projector=option)
        assert (model.projector is not None) == expected
    with pytest.raises(ConfigError, match="20 columns"):
        vlm_from_configs(VISION, TEXT, image_token_id=0, projector="none")
    with pytest.raises(ConfigError, match="'linear'"):
        vlm_from_configs(VISION, TEXT, image_token_id=0, projector="linear")


def test_rotary_tables_stay_exact_in_bfloat16():
    model = nano_vlm()
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert any("inv_freq" in name for name in before)
    model.bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, table in model.named_buffers():
        assert table.dtype == torch.float32
        assert torch.equal(table, before[name])
    assert model.to("meta").llm.model.rotary_emb.inv_freq.device.type == "meta"
