"""FLOPs of whole modules on packed microbatches, and of mixtures of experts."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_entrain.model_shapes import shape_of_model
from lightning_entrain.models.freezing import freeze
from lightning_entrain.models.lora import LoraOptions, add_lora
from lightning_entrain.models.protocol import EncoderPacking, LlmPacking
from lightning_entrain.models.recompute import recompute_layers
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.planning import workload_of
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


FROZEN = [
    (),
    ("encoder",),
    ("encoder", "projector"),
    ("encoder", "llm"),
    ("llm",),
    ("llm", "projector"),
]


def trained_step(model) -> int:
    """Operations of forward and backward of the samples as one microbatch, as torch counts them."""
    packing = EncoderPacking(grids=tuple(grid for s in SAMPLES for grid in s.grids))
    rows = LlmPacking(sample_lengths=tuple(s.num_tokens for s in SAMPLES))
    pixels = torch.randn(packing.num_patches, model.encoder.patch_dim)
    ids = torch.randint(1, 512, (rows.num_tokens,))
    ids[: sum(s.num_vision_tokens for s in SAMPLES)] = 0

    def run() -> None:
        features = model.encoder_stage(pixels, packing, start=0, stop=4)
        logits = model.llm_stage(features, rows, start=0, stop=4, input_ids=ids)
        logits.sum().backward()

    return counted(run)


@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_a_step_counts_the_backward_that_is_needed(frozen: tuple[str, ...]) -> None:
    model = tiny_vlm(vocab_size=512, image_token_id=0)
    freeze(model, frozen)
    workload = workload_of(model, torch.device("cpu"))
    assert workload is not None
    assert workload.training_flops(SAMPLES) == pytest.approx(trained_step(model), rel=0.02)


def test_layers_that_are_frozen_one_by_one_and_adapters_count_by_what_is_trained() -> None:
    pytest.importorskip("peft")
    model = tiny_vlm(vocab_size=512, image_token_id=0)
    for name in model.encoder.layer_names()[:2]:
        model.encoder.get_submodule(name).requires_grad_(False)
    for name in model.encoder.prologue_names():
        model.encoder.get_submodule(name).requires_grad_(False)
    workload = workload_of(model, torch.device("cpu"))
    assert workload is not None
    assert workload.training_flops(SAMPLES) == pytest.approx(trained_step(model), rel=0.02)
    model = tiny_vlm(vocab_size=512, image_token_id=0)
    freeze(model, ("encoder", "projector"))
    add_lora(model, llm=LoraOptions(rank=2))
    for name in model.llm.prologue_names() + model.llm.epilogue_names():
        model.llm.get_submodule(name).requires_grad_(False)
    workload = workload_of(model, torch.device("cpu"))
    assert workload is not None
    assert workload.training_flops(SAMPLES) == pytest.approx(trained_step(model), rel=0.04)


def test_recomputation_costs_time_and_no_model_flops() -> None:
    """An LLM recomputed whole runs its blocks' forward once more, every second layer half of it."""
    found = {}
    for what in ("none", "every_2", "full"):
        model = tiny_vlm(vocab_size=512)
        recompute_layers(model.llm, what)
        workload = workload_of(model, torch.device("cpu"))
        assert workload is not None
        encoder, llm = workload.sample_costs(SAMPLES)
        found[what] = sum(encoder), sum(llm), workload.training_flops(SAMPLES)
    none, half, full = (found[what] for what in ("none", "every_2", "full"))
    assert none[0] == half[0] == full[0]
    assert none[2] == half[2] == full[2]
    forward = 2 * (half[1] - none[1])
    assert full[1] - none[1] == pytest.approx(forward)
    assert 0.25 < forward / none[1] < 0.4
