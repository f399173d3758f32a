"""Device rooflines and the analytic cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.costs import module_cost, sample_costs
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.hardware import (
    DEVICES,
    PUBLISHED_MATMULS,
    Cluster,
    cpu_device,
    device,
)
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.layers import AttentionPattern
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.roofline import AnalyticCostModel
from lightning_entrain.workload.tables import SizeTable

MODELS = Path(__file__).parents[2] / "conf" / "planning" / "model"
SHAPE = model_shape(yaml.safe_load((MODELS / "qwen2_5vision_llama3_1b.yaml").read_text()))
TABLE = sample_sizes("llava150k", 64, 0)
A40 = AnalyticCostModel(device=device("a40"))
PROCESSORS = {"rtx4060ti": 34, "b200": 148}


@pytest.mark.parametrize("name", PROCESSORS)
def test_curve_fits_the_published_matmuls(name: str) -> None:
    """Within 10 % of every published point, after scaling the series to its mean."""
    points = [(side, speed) for which, side, speed in PUBLISHED_MATMULS if which == name]
    peak = max(speed for _, speed in points)
    gpu = replace(
        device("b200"),
        peak_tflops={"bfloat16": peak},
        matmul_efficiency=1.0,
        num_processors=PROCESSORS[name],
    )
    ratios = []
    for side, speed in points:
        work = 2.0 * side**3 / 1e9
        predicted = work / (work / float(gpu.matmul_tflops(side, side, side)) + gpu.launch_ms)
        ratios.append(predicted / speed)
    ratios = np.array(ratios) / np.exp(np.mean(np.log(ratios)))
    assert np.abs(ratios - 1).max() < 0.10


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_sane(name: str) -> None:
    gpu = device(name)
    small = gpu.matmul_tflops(64, 1280, 1280)
    large = gpu.matmul_tflops(16384, 8192, 8192)
    assert 0 < small < large < gpu.peak("bfloat16")
    assert large > 0.9 * gpu.peak("bfloat16") * gpu.matmul_efficiency
    assert gpu.reserved_gib < gpu.memory_gib / 4


def test_unknown_device_and_dtype() -> None:
    with pytest.raises(ConfigError, match="'tpu'"):
        device("tpu")
    with pytest.raises(ConfigError, match="int3"):
        device("a40").peak("int3")
    with pytest.raises(ConfigError, match="num_gpus is 0"):
        Cluster(device=device("a40"), num_gpus=0, gpus_per_node=8, link_gbps=1, network_gbps=1)


def costs(training: Training, **options):
    return sample_costs(SHAPE, TABLE, A40, training, **options)


def test_backward_is_about_twice_forward() -> None:
    found = costs(Training())
    for forward, backward in (
        (found.encoder_forward_ms, found.encoder_backward_ms),
        (found.llm_forward_ms, found.llm_backward_ms),
    ):
        assert np.all((backward / forward > 1.8) & (backward / forward < 2.6))


def test_frozen_modules_and_adapters_save_backward() -> None:
    full = costs(Training())
    frozen = costs(Training(encoder="frozen", projector="frozen"))
    assert (frozen.encoder_backward_ms == 0).all()
    assert (frozen.encoder_forward_ms == full.encoder_forward_ms).all()
    llm = costs(Training(llm="frozen"))
    share = llm.llm_backward_ms.sum() / full.llm_backward_ms.sum()
    assert 0.4 < share < 0.7  # gradients still flow through it
    nothing = costs(Training(llm="frozen", encoder="frozen", projector="frozen"))
    assert (nothing.llm_backward_ms == 0).all()
    recomputed = costs(Training(recompute=True))
    added = recomputed.llm_backward_ms - full.llm_backward_ms
    assert 0.7 < (added / full.llm_forward_ms).mean() < 1.0  # blocks, not head and embedding


def test_tensor_parallelism_speeds_up_and_talks() -> None:
    one, two = costs(Training()), costs(Training(), encoder_tp=2, llm_tp=2)
    ratio = one.llm_ms.sum() / two.llm_ms.sum()
    assert 1.2 < ratio < 2.0
    slow = AnalyticCostModel(device=device("a40"), link_gbps=5)
    crawling = sample_costs(SHAPE, TABLE, slow, Training(), encoder_tp=2, llm_tp=2)
    assert crawling.llm_ms.sum() > two.llm_ms.sum()


def test_context_parallelism_divides_rows() -> None:
    load = SHAPE.llm.load(TABLE).sum()
    whole = module_cost(SHAPE.llm, load, A40, Training())[0][0]
    halves = module_cost(SHAPE.llm, load, A40, Training(), cp=2)[0][0]
    assert 0.5 * whole < halves < 0.7 * whole


def test_text_only_samples_cost_no_encoder_time() -> None:
    table = sample_sizes("llava150k", 4, 0)
    zero = table.num_patches * np.array([0, 1, 1, 1])
    blank = replace(
        table,
        num_patches=zero,
        num_images=np.array([0, 1, 1, 1]),
        num_vision_tokens=zero // 4,
        full_pairs=zero * 10,
        window_pairs=zero * 10,
    )
    assert sample_costs(SHAPE, blank, A40).encoder_ms[0] == 0.0


def test_parts_add_up_to_the_microbatch() -> None:
    """Samples that run together cost what their microbatch costs."""
    load = SHAPE.llm.load(TABLE)
    rows = float(load.rows.sum())
    apart = module_cost(SHAPE.llm, load, A40, Training(), rows_together=rows)[0].sum()
    together = module_cost(SHAPE.llm, load.sum(), A40, Training())[0][0]
    assert apart == pytest.approx(together, rel=0.02)


def test_cpu_roofline() -> None:
    cpu = AnalyticCostModel(device=cpu_device(peak_tflops=0.1, bandwidth_gbps=10, memory_gib=16))
    slow = sample_costs(SHAPE, TABLE, cpu, Training(precision="32-true"))
    assert slow.llm_ms.sum() > 100 * costs(Training()).llm_ms.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "melted"}, "training.encoder is 'melted'"),
        ({"precision": "int4"}, "training.precision"),
        ({"optimizer": "magic"}, "training.optimizer"),
        ({"lora_rank": 0}, "lora_rank is 0"),
    ],
)
def test_bad_training(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Training(**options)


@pytest.mark.parametrize("part", ["encoder", "llm"])
def test_heads_not_divisible(part: str) -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        costs(Training(), **{f"{part}_tp": 3})


def test_causal_kernels_skip_half_of_the_square() -> None:
    block = SHAPE.llm.blocks[0]
    assert block.attention is not None
    whole = replace(block, attention=replace(block.attention, pattern=AttentionPattern.FULL))
    bare = replace(block, attention=None)
    load = SHAPE.llm.load(SizeTable.from_single_images([0], [0], [8000]))
    load = replace(load, pairs={**load.pairs, AttentionPattern.FULL: load.rows**2})
    causal, full, none = (
        float(A40.layer_cost("llm", layer, load, Training()).forward_ms[0])
        for layer in (block, whole, bare)
    )
    assert causal - none == pytest.approx((full - none) / 2, rel=0.01)
