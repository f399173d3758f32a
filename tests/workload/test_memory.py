"""Parameters, gradients and optimizer states against torch."""

from __future__ import annotations

import pytest
import torch
import transformers

from lightning_entrain.workload.hf_config import llm_shape
from lightning_entrain.workload.memory import Training, state_bytes
from tests.workload.hf_layers import LLM


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum", "sgd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("tied", [True, False])
def test_state_bytes_are_exact(optimizer: str, precision: str, tied: bool) -> None:
    config = transformers.AutoConfig.for_model("llama", **LLM, tie_word_embeddings=tied)
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    updater = makers[optimizer](model.parameters())
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    updater.step()
    parameters = list(model.parameters())
    states = [
        value
        for state in updater.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim() > 0
    ]
    layers = llm_shape(config.to_dict()).layers
    found = state_bytes("llm", layers, Training(precision=precision, optimizer=optimizer))
    assert found.parameters == sum(p.nbytes for p in parameters)
    assert found.gradients == sum(p.grad.nbytes for p in parameters)
    assert found.optimizer == sum(value.nbytes for value in states)


def test_tied_weights_on_two_stages_are_two_copies() -> None:
    shape = llm_shape({"model_type": "llama", **LLM, "tie_word_embeddings": True})
    training = Training(precision="32-true")
    whole = state_bytes("llm", shape.layers, training)
    parts = [state_bytes("llm", shape.stage_layers(a, b), training) for a, b in ((0, 3), (3, 6))]
    extra = sum(part.num_parameters for part in parts) - whole.num_parameters
    assert extra == LLM["vocab_size"] * LLM["hidden_size"]


def test_frozen_and_lora_states() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **LLM, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*names, "lm_head"]))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    layers = llm_shape(config.to_dict()).layers
    lora = state_bytes("llm", layers, Training(llm="lora", lora_rank=4))
    assert lora.num_trained == trained
    assert lora.num_parameters == sum(p.numel() for p in adapted.parameters())
    frozen = state_bytes("llm", layers, Training(llm="frozen"))
    assert frozen.gradients == frozen.optimizer == 0


def test_tensor_parallel_ranks_hold_all_parameters_between_them() -> None:
    layers = llm_shape({"model_type": "llama", **LLM, "tie_word_embeddings": False}).layers
    one = state_bytes("llm", layers, Training()).num_parameters
    two = state_bytes("llm", layers, Training(), tp=2).num_parameters
    norms = sum(layer.other_parameters for layer in layers)
    assert 2 * two - one == norms  # norms are held twice, everything else is split
