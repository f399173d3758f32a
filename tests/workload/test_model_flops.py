"""FLOPs of whole modules on packed microbatches, and of mixtures of experts."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_entrain.model_shapes import shape_of_model
from lightning_entrain.models.protocol import EncoderPacking, LlmPacking
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.workload.flops import module_flops
from lightning_entrain.workload.hf_config import llm_shape
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable
from tests.workload.hf_layers import LLM, causal_load

SAMPLES = [
    SampleSize(grids=((1, 12, 20),), num_text_tokens=30, num_label_tokens=5),
    SampleSize(grids=((1, 8, 8), (1, 34, 10)), num_text_tokens=70, num_label_tokens=5),
    SampleSize(grids=(), num_text_tokens=55, num_label_tokens=5),
]


def counted(run) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("module", ["encoder", "llm"])
def test_packed_microbatch(module: str) -> None:
    model = tiny_vlm(vocab_size=512)
    shape = getattr(shape_of_model(model), module)
    load = shape.load(SizeTable.from_sizes(SAMPLES, window=8)).sum()
    if module == "encoder":
        packing = EncoderPacking(grids=tuple(grid for s in SAMPLES for grid in s.grids))
        pixels = torch.randn(packing.num_patches, model.encoder.patch_dim)
        found = counted(lambda: model.encoder_stage(pixels, packing, start=0, stop=4))
    else:
        rows = LlmPacking(sample_lengths=tuple(s.num_tokens for s in SAMPLES))
        ids = torch.randint(1, 512, (rows.num_tokens,))
        found = counted(lambda: model.llm_stage(None, rows, start=0, stop=4, input_ids=ids))
    assert float(module_flops(shape, load)[0]) == pytest.approx(found, rel=0.02)


MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
}


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_count_active_experts(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **LLM, **MIXTURES[family])
    config._experts_implementation = "eager"  # one matrix multiplication per expert, countable
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(1, 1000, (1, 64))
    shape = llm_shape(config.to_dict())
    predicted = float(module_flops(shape, causal_load(64))[0])
    assert predicted == pytest.approx(counted(lambda: model(input_ids=ids)), rel=0.02)
