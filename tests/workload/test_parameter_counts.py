"""Parameter counts from shapes equal those of the instantiated models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from lightning_entrain.workload.hf_config import llm_shape, model_shape

MODELS = Path(__file__).parents[2] / "conf" / "planning" / "model"
OWN = sorted(path.stem for path in MODELS.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((MODELS / f"{name}.yaml").read_text())


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", [name for name in OWN if "model_type" in load(name)])
def test_whole_models(name: str) -> None:
    config = load(name)
    hf = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(hf)
    model.tie_weights()
    assert model_shape(config).num_parameters == count(model)
    towers = [module for key, module in model.named_modules() if key in VISION_NAMES]
    assert model_shape(config).encoder.num_parameters == sum(count(tower) for tower in towers) + (
        config["text_config"]["hidden_size"] if config["model_type"] == "llava_onevision" else 0
    )


VISION_NAMES = {
    "model.visual",
    "model.vision_tower",
    "model.vision_model",
    "model.multi_modal_projector",
    "model.connector",
}


@pytest.mark.parametrize("name", [name for name in OWN if "model_type" not in load(name)])
def test_free_halves(name: str) -> None:
    config = load(name)
    vision = dict(config["vision_config"], model_type="qwen2_5_vl_vision")
    with torch.device("meta"):
        encoder = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(
            qwen.Qwen2_5_VLVisionConfig(**vision)
        )
        llm = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config["text_config"])
        )
    llm.tie_weights()
    shape = model_shape(config)
    assert shape.encoder.num_parameters == count(encoder)
    assert shape.llm.num_parameters == count(llm)


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"num_hidden_layers": 4, "vocab_size": 128, "intermediate_size": 96}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gemma3_text": {"sliding_window": 32},
    "smollm3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_decoder_families(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **SMALL, **MIXTURES[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert llm_shape(config.to_dict()).num_parameters == count(model)
