"""Recomputing parts of layers: equal gradients, one forward more, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.recompute import recompute_layers, recomputed_share
from lightning_entrain.models.tiny import nano_vlm
from tests.models.helpers import make_batch

BATCH = make_batch(([[0, 1, 2, 3]], [[0, 1, 2, 3]]), rows=[0, 1, 2, 4])


class LiveBytes(TorchDispatchMode):
    """Bytes of what was allocated inside and is still referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        return sum(size for ref, size in self.found.values() if not ref.expired())


def run(what: str) -> tuple[dict[str, int], int, dict[str, torch.Tensor]]:
    """Calls of parts, bytes kept from forward to backward, gradients."""
    model = nano_vlm(encoder_layers=4, llm_layers=4)
    recompute_layers(model.encoder, what)
    recompute_layers(model.llm, what)
    calls = {"layer": 0, "attention": 0, "mlp": 0}

    def count(part: str) -> Any:
        def hook(*args: Any) -> None:
            calls[part] += 1

        return hook

    for layer in (*model.llm.model.layers, *model.encoder.blocks):
        norm = getattr(layer, "input_layernorm", None) or layer.norm1
        attention = getattr(layer, "self_attn", None) or layer.attn
        # Their first parts: recomputation may stop before a module's end.
        norm.register_forward_pre_hook(count("layer"))
        (getattr(attention, "q_proj", None) or attention.qkv).register_forward_pre_hook(
            count("attention")
        )
        layer.mlp.gate_proj.register_forward_pre_hook(count("mlp"))
    with LiveBytes() as live:
        loss = model(BATCH)
        kept = live.total()
    loss.backward()
    return calls, kept, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_each_choice_recomputes_what_it_says_and_no_more() -> None:
    calls, kept, gradients = {}, {}, {}
    for what in ("none", "full", "every_2", "attention", "mlp"):
        calls[what], kept[what], gradients[what] = run(what)
    assert calls["none"] == {"layer": 8, "attention": 8, "mlp": 8}
    assert calls["full"] == {"layer": 16, "attention": 16, "mlp": 16}
    assert calls["every_2"] == {"layer": 12, "attention": 12, "mlp": 12}
    assert calls["attention"] == {"layer": 8, "attention": 16, "mlp": 8}
    assert calls["mlp"] == {"layer": 8, "attention": 8, "mlp": 16}
    assert kept["full"] < 0.45 * kept["none"]
    assert kept["full"] < kept["every_2"] < 0.75 * kept["none"]
    assert max(kept["attention"], kept["mlp"]) < 0.85 * kept["none"]
    for found in gradients.values():
        assert set(found) == set(gradients["none"])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients["none"][name], rtol=0, atol=1e-7)


def test_the_last_call_counts_and_names_stay() -> None:
    model: EntrainModel = nano_vlm(llm_recompute="full", encoder_recompute="attention")
    names = list(nano_vlm().state_dict())
    assert list(model.state_dict()) == names
    assert recomputed_share(model.llm) == 1.0
    assert 0.2 < recomputed_share(model.encoder) < 0.6
    recompute_layers(model.llm, "every_3")
    assert recomputed_share(model.llm) == pytest.approx(1 / 3)
    recompute_layers(model.llm, "none")
    assert recomputed_share(model.llm) == 0.0


@pytest.mark.parametrize("what", ["all", "every_0", "every_", "every_2.5"])
def test_unknown_choices_are_refused(what: str) -> None:
    with pytest.raises(ConfigError, match=r"recompute is .*none, full, every_N, attention or mlp"):
        nano_vlm(llm_recompute=what)


def test_layers_without_that_part_are_refused() -> None:
    model = nano_vlm()
    model.llm.model.layers[1].mlp = None
    with pytest.raises(ConfigError, match=r"Layer model.layers.1 .*has none of mlp.*full"):
        recompute_layers(model.llm, "mlp")
