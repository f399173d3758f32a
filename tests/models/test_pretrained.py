"""Weights come from Hugging Face checkpoints, and go back to them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from lightning_entrain.errors import CheckpointError, ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.pretrained import export_pretrained, vlm_from_pretrained
from lightning_entrain.models.projector import MlpProjector
from lightning_entrain.models.tiny import nano_vlm

from .helpers import make_batch


@pytest.fixture
def model() -> EntrainModel:
    made = nano_vlm(seed=9)
    return EntrainModel(made.encoder, made.llm, MlpProjector(24, 24))


def assert_equal_states(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_there_and_back(model, tmp_path):
    export_pretrained(model, tmp_path)
    assert "lightning_entrain" not in (tmp_path / "llm" / "config.json").read_text()
    found = vlm_from_pretrained(
        str(tmp_path / "vision"),
        str(tmp_path / "llm"),
        image_token_id=0,
        projector="mlp",
        projector_path=str(tmp_path / "projector.safetensors"),
    )
    assert found.training
    assert all(module.training for module in found.modules())
    assert_equal_states(found, model)
    batch = make_batch(([[0, 1, 2]], [[2, 0, 1]]), rows=[0, 1, 2])
    assert torch.equal(found(batch), model(batch))


def test_exported_llm_is_a_hugging_face_model(model, tmp_path):
    export_pretrained(model, tmp_path)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    assert_equal_states(text, model.llm)


def test_vision_tower_of_a_whole_qwen_checkpoint(model, tmp_path):
    export_pretrained(model, tmp_path)
    config = Qwen2_5_VLConfig(
        vision_config=model.encoder.config.to_dict(),
        text_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 30,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 2, 2],
                "rope_theta": 1e4,
            },
        },
    )
    whole = Qwen2_5_VLForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    found = vlm_from_pretrained(
        str(tmp_path / "whole"), str(tmp_path / "llm"), image_token_id=0, dtype="bfloat16"
    )
    assert found.projector is None
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert_equal_states(found.encoder, whole.model.visual.bfloat16())


def test_new_projector_is_seeded(model, tmp_path):
    export_pretrained(model, tmp_path)
    paths = str(tmp_path / "vision"), str(tmp_path / "llm")
    made = [
        vlm_from_pretrained(*paths, image_token_id=0, projector="mlp", seed=seed).projector
        for seed in (1, 1, 2)
    ]
    assert_equal_states(made[0], made[1])
    assert not torch.equal(made[0].linear_in.weight, made[2].linear_in.weight)


def test_checkpoint_without_all_weights(model, tmp_path):
    export_pretrained(model, tmp_path)
    config_file = tmp_path / "llm" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"lacks 9 weights, such as model\.layers\.3"):
        vlm_from_pretrained(str(tmp_path / "vision"), str(tmp_path / "llm"), image_token_id=0)


def test_wrong_options(model, tmp_path):
    export_pretrained(model, tmp_path)
    vision, llm = str(tmp_path / "vision"), str(tmp_path / "llm")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        vlm_from_pretrained(vision, llm, image_token_id=0, dtype="int8")
    with pytest.raises(ConfigError, match="type 'llama'"):
        vlm_from_pretrained(llm, llm, image_token_id=0)
    with pytest.raises(ConfigError, match="no projector"):
        vlm_from_pretrained(vision, llm, image_token_id=0, projector_path="somewhere")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        vlm_from_pretrained(
            vision,
            llm,
            image_token_id=0,
            projector="mlp",
            projector_path=str(tmp_path / "llm" / "model.safetensors"),
        )
