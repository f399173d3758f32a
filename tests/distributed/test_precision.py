"""bfloat16: close to one process in the same precision, within the bounds stated in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_entrain.models.lora import LoraOptions, add_lora
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.accumulate import GradientAccumulator
from lightning_entrain.runtime.gradients import clip_by_norm, global_norm, scale_gradients
from lightning_entrain.runtime.stages import StageRunner
from lightning_entrain.schedule.types import Placement
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import relative


def _fit(job: Job, options: dict[str, Any], devices: int, root: Path) -> tuple[Outcome, str]:
    """The outcome, and the type of what ranks send each other."""
    strategy = EntrainStrategy(**options)
    dtypes = []
    make = job.module

    def module() -> Module:
        made = make()
        made.on_train_end = lambda: dtypes.append(strategy.last_step_plan.program.dtype)  # type: ignore
        return made

    job.module = module  # type: ignore[method-assign]
    return job.fit(strategy, devices, root).to_numpy(), dtypes[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(3, {"llm_stages": 2}, id="1+2 1f1b"),
        pytest.param(2, {"schedule": "zero_bubble"}, id="1+1 zero bubble"),
        pytest.param(2, {"full_precision_gradients": False}, id="1+1 bf16 sums"),
    ],
)
def test_bf16(precision: str, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    job = Job(
        num_batches=4,
        batch_size=12,
        num_microbatches=4,
        policy="entrain",
        trainer={"precision": precision},
    )
    one = job.fit(None, 1, tmp_path).to_numpy()
    found = run_ranks(devices, _fit, job, options, devices, tmp_path)
    assert {dtype for _, dtype in found} == {"bfloat16"}
    ranks = [outcome for outcome, _ in found]
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, one.losses, rtol=5e-3)
        for name, gradient in rank.first_gradients.items():
            assert relative(gradient, one.first_gradients[name]) < 5e-2, name
    reached = {name for rank in ranks for name in rank.first_gradients}
    assert reached == set(one.first_gradients)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_each_stage_carries_on_in_the_type_of_its_own_layers(compute: torch.dtype) -> None:
    """A rank may hold stages of two types, and adapters in a third."""
    layout = StageLayout(
        num_replicas=1,
        encoder_ranges=((0, 3),),
        llm_ranges=((0, 1), (1, 3)),
        placement=Placement.one_per_rank(1, 2),
    )
    job = Job()
    model = job.module().model
    add_lora(model, encoder=None, llm=LoraOptions(rank=64))
    model.encoder.bfloat16()
    for name, parameter in model.llm.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(compute)
    runner = StageRunner(model, layout, torch.float16)
    rows = torch.zeros(3, 4, dtype=torch.float16)
    found = [runner._as_computed(stage, rows).dtype for stage in range(3)]
    assert found == [torch.bfloat16, compute, compute]
    index = torch.zeros(3, dtype=torch.long)
    assert runner._as_computed(0, index).dtype == torch.long


def test_small_gradients_do_not_vanish_in_bf16() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    sums = {}
    for full in (True, False):
        accumulator = GradientAccumulator([parameter], full_precision=full)
        with accumulator.collecting():
            (parameter * 256.0).sum().backward()
            for _ in range(100):
                (parameter * 0.5).sum().backward()
                accumulator.add(parameter, torch.full_like(parameter, 0.5))
        (gradient,) = accumulator.take()
        assert gradient is not None
        assert parameter.grad is None
        sums[full] = float(gradient[0])
        (parameter * 2.0).sum().backward()  # the user's own, outside of a step
        assert parameter.grad is not None
        parameter.grad = None
        accumulator.remove()
    assert sums == {True: 356.0, False: 256.0}


def test_norms_and_factors_of_bf16_gradients_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(300, generator=generator).bfloat16() for _ in range(7)]
    gradients.append(torch.randn(50, generator=generator))
    exact = torch.cat([gradient.double() for gradient in gradients]).norm()
    norm = global_norm(gradients, torch.device("cpu"), None)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)

    factor = torch.tensor(1.0 / 3.0)
    scaled = [gradient.clone() for gradient in gradients]
    scale_gradients(scaled, factor)
    for gradient, found in zip(gradients, scaled, strict=True):
        expected = (gradient.double() / 3.0).to(gradient.dtype)
        torch.testing.assert_close(
            found, expected, rtol=0 if found.dtype != torch.float32 else 1e-6, atol=0
        )

    clip_by_norm(gradients, 1.5, norm)
    clipped = torch.cat([gradient.double() for gradient in gradients]).norm()
    assert float(clipped) == pytest.approx(1.5, rel=2e-4)
