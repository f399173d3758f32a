"""Plans for models that exist, as the strategy makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_entrain.errors import ConfigError
from lightning_entrain.model_shapes import shape_of_model
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.plan.planner import make_plan, profile_workload
from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.types import ParallelPlan, Supported
from lightning_entrain.workload.hardware import Cluster, device
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.roofline import AnalyticCostModel
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable

SIZES = [
    SampleSize(grids=((1, 8 + 2 * (i % 9), 12),), num_text_tokens=10 + i, num_label_tokens=5)
    for i in range(60)
]
TABLE = SizeTable.from_sizes(SIZES)


@pytest.mark.parametrize("options", [{}, {"llm_hidden_size": 96, "encoder_layers": 3}])
def test_shape_of_the_tiny_model(options: dict[str, int]) -> None:
    model = tiny_vlm(vocab_size=500, **options)
    shape = shape_of_model(model)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.encoder.num_layers == model.encoder.num_layers
    assert shape.llm.num_layers == model.llm.num_layers


def test_shape_with_a_projector() -> None:
    from lightning_entrain.models.entrain_model import EntrainModel
    from lightning_entrain.models.projector import MlpProjector

    base = tiny_vlm(vocab_size=500)
    model = EntrainModel(base.encoder, base.llm, MlpProjector(192, 192, 64))
    assert shape_of_model(model).num_parameters == sum(p.numel() for p in model.parameters())


def test_modules_without_a_config() -> None:
    model = tiny_vlm(vocab_size=500)
    model.encoder = torch.nn.Linear(1, 1)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="encoder is a Linear"):
        shape_of_model(model)


def request(num_gpus: int = 4) -> PlanRequest:
    gpu = device("a40")
    return PlanRequest(
        model=shape_of_model(tiny_vlm(vocab_size=500)),
        table=TABLE,
        cluster=Cluster(
            device=gpu, num_gpus=num_gpus, gpus_per_node=4, link_gbps=50, network_gbps=10
        ),
        cost_model=AnalyticCostModel(device=gpu),
        training=Training(precision="32-true"),
        global_batch_size=16,
        microbatch_sizes=(1, 2),
    )


def test_a_runnable_plan_with_its_profile() -> None:
    report = make_plan(request(), supported=Supported(), runnable_only=True, names={"data": "own"})
    plan = report.plan
    assert plan.num_gpus == 4
    assert plan.not_runnable == ()
    assert plan.b_min == report.profile.b_min.b_min
    assert set(plan.proportions) == {"encoder", "llm"}
    assert plan.data == "own"
    again = make_plan(request(), supported=Supported(), runnable_only=True, names={"data": "own"})
    assert again.plan.to_json() == plan.to_json()
    assert ParallelPlan.from_json(plan.to_json()) == plan


def test_profile_follows_the_work() -> None:
    task = request()
    full = profile_workload(task.model, TABLE, task.cost_model, 16)
    frozen = profile_workload(
        task.model, TABLE, task.cost_model, 16, training=Training(encoder="frozen")
    )
    assert frozen.proportions["encoder"] < full.proportions["encoder"]
    assert sum(full.proportions.values()) == pytest.approx(1)
    heavier = replace(TABLE, num_text_tokens=TABLE.num_text_tokens * 10)
    texts = profile_workload(task.model, heavier, task.cost_model, 16)
    assert texts.proportions["llm"] > full.proportions["llm"]
    assert list(full.split_names) == [1, 4, 16, 64, 256]
