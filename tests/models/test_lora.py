"""Adapters: what they change, what they do not, and where they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_entrain.checkpoint.model_record import build_model, model_record
from lightning_entrain.errors import CheckpointError, ConfigError
from lightning_entrain.models.lora import (
    LoraOptions,
    add_lora,
    load_adapters,
    save_adapters,
)
from lightning_entrain.models.pretrained import export_pretrained, vlm_from_pretrained
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.module import EntrainLightningModule
from tests.models.helpers import make_batch

BATCH = make_batch(([[0, 1, 2]], [[2, 0, 1]]), rows=[0, 1, 2])


def adapted():
    """A model whose adapters have been trained a little."""
    model = nano_vlm()
    add_lora(model, encoder=LoraOptions(rank=2), llm=LoraOptions(rank=4, targets=("q_proj",)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_new_adapters_change_nothing_and_only_they_are_trained():
    plain, model = nano_vlm(), nano_vlm()
    add_lora(model, encoder=LoraOptions(), llm=LoraOptions())
    assert model(BATCH).item() == plain(BATCH).item()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained)
    # q, k, v, o, gate, up, down; qkv, proj, gate, up, down: two factors each, in three layers.
    assert len(trained) == 3 * 2 * (7 + 5)
    assert not model.encoder.merger.ln_q.weight.requires_grad
    again = nano_vlm()
    add_lora(again, encoder=LoraOptions(), llm=LoraOptions())
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_export_merges_adapters_and_leaves_the_model_alone(tmp_path: Path):
    model = adapted()
    before = model(BATCH).item()
    export_pretrained(model, tmp_path)
    assert model(BATCH).item() == before
    found = vlm_from_pretrained(
        str(tmp_path / "vision"), str(tmp_path / "llm"), image_token_id=0, projector="none"
    )
    assert list(found.state_dict()) == list(nano_vlm().state_dict())
    assert found(BATCH).item() == pytest.approx(before, rel=1e-6)
    assert abs(before - nano_vlm()(BATCH).item()) > 1e-4


def test_adapters_are_written_for_peft_and_read_back(tmp_path: Path):
    model = adapted()
    save_adapters(model, tmp_path / "adapters")
    export_pretrained(nano_vlm(), tmp_path / "base")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "llm")
    beside = PeftModel.from_pretrained(text, tmp_path / "adapters" / "llm")
    ids = torch.arange(1, 9)[None]
    expected = model.llm.hugging_face_model(input_ids=ids).logits
    torch.testing.assert_close(beside(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)

    other = nano_vlm()
    add_lora(other, encoder=LoraOptions(rank=2), llm=LoraOptions(rank=4, targets=("q_proj",)))
    load_adapters(other, tmp_path / "adapters")
    assert other(BATCH).item() == pytest.approx(model(BATCH).item(), rel=1e-6)
    wrong = nano_vlm()
    add_lora(wrong, llm=LoraOptions(rank=4, targets=("v_proj",)))
    with pytest.raises(CheckpointError, match="holds other adapters"):
        load_adapters(wrong, tmp_path / "adapters")


def test_a_checkpoint_tells_of_the_adapters():
    model = adapted()
    record = model_record(EntrainLightningModule(model))
    assert record is not None
    rebuilt = build_model(record)
    assert list(rebuilt.state_dict()) == list(model.state_dict())


def test_refusals():
    with pytest.raises(ConfigError, match=r"LoRA target 'query' of the llm.*such as q_proj"):
        add_lora(nano_vlm(), llm=LoraOptions(targets=("query",)))
    with pytest.raises(ConfigError, match="The llm has adapters already"):
        add_lora(adapted(), llm=LoraOptions())
    with pytest.raises(ConfigError, match="lora has 'projector'"):
        EntrainLightningModule(nano_vlm(), lora=["projector"])
    with pytest.raises(ConfigError, match="rank is 0"):
        LoraOptions(rank=0)
    with pytest.raises(ConfigError, match="no adapters"):
        save_adapters(nano_vlm(), "unused")
