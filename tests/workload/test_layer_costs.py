"""FLOPs and saved activations of every layer kind against torch's own accounting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_entrain.workload.flops import layer_flops
from lightning_entrain.workload.memory import saved_bytes
from tests.workload.hf_layers import CASES, Case


def measured_saved_bytes(case: Case) -> int:
    """Bytes of the distinct storages that autograd packs, parameters and shared tables left out."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # else its address may be given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = case.run()
    assert output.requires_grad
    left_out = [*case.module.parameters(), *case.module.buffers(), *case.shared]
    for tensor in left_out:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_saved_activations_within_5_percent(name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype)
    measured = measured_saved_bytes(case)
    predicted = float(saved_bytes(case.layer, case.load, element_bytes=dtype.itemsize)[0])
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_flops_within_2_percent(name: str) -> None:
    case = CASES[name](torch.float32)
    # The counter does not know the CPU's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.run()
    predicted = float(layer_flops(case.layer, case.load)[0])
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name", ["llama block", "qwen window block", "clip block"])
def test_a_frozen_layer_keeps_less(name: str) -> None:
    case = CASES[name](torch.float32)
    for parameter in case.module.parameters():
        parameter.requires_grad_(False)
    measured = measured_saved_bytes(case)
    predicted = float(saved_bytes(case.layer, case.load, element_bytes=4, mode="frozen")[0])
    assert predicted == pytest.approx(measured, rel=0.05)
