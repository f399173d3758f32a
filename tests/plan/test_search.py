"""The topology search: exhaustive agreement, memory, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.plan.request import CostBook, PlanRequest
from lightning_entrain.plan.score import assess, memory_excess
from lightning_entrain.plan.search import enumerate_topologies, search_plans
from lightning_entrain.plan.types import ParallelPlan, Supported
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.hardware import Cluster, device
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.roofline import AnalyticCostModel

MODELS = Path(__file__).parents[2] / "conf" / "planning" / "model"


def request(gpus: int = 16, *, model: str = "qwen2_5vision_llama3_1b", **options) -> PlanRequest:
    gpu = device(options.pop("gpu", "a40"))
    cluster = Cluster(
        device=gpu, num_gpus=gpus, gpus_per_node=8, link_gbps=gpu.link_gbps, network_gbps=6.25
    )
    config = yaml.safe_load((MODELS / f"{model}.yaml").read_text())
    defaults = {"global_batch_size": 64, "microbatch_sizes": (2, 4)}
    return PlanRequest(
        model=model_shape(config, name=model),
        table=sample_sizes(options.pop("data", "llava150k"), 2000, 0),
        cluster=cluster,
        cost_model=AnalyticCostModel(device=gpu),
        **{**defaults, **options},
    )


def test_best_is_the_fastest_that_fits() -> None:
    task = request()
    result = search_plans(task)
    book = CostBook(task)
    fitting = []
    for topology in enumerate_topologies(task, None):
        candidate = assess(task, book, topology)
        if memory_excess(task, book, candidate) <= 0:
            fitting.append(candidate.iteration_ms)
    assert result.best.iteration_ms == pytest.approx(min(fitting))
    times = [plan.iteration_ms for plan in result.plans]
    assert times == sorted(times)


def test_a_plan_is_consistent() -> None:
    task = request()
    for plan in search_plans(task).plans:
        assert plan.num_gpus == 16
        assert plan.encoder_layers[-1][1] == 32
        assert plan.llm_layers[-1][1] == 16
        assert len(plan.stages) == plan.encoder_stages + plan.llm_stages
        assert all(stage.memory_gib * 2**30 <= task.cluster.usable_bytes for stage in plan.stages)
        assert sum(plan.proportions.values()) == pytest.approx(1)
        assert ParallelPlan.from_json(plan.to_json()) == plan
        busiest = max(stage.time_ms for stage in plan.stages)
        assert plan.iteration_ms > plan.num_microbatches * busiest


def test_the_formula_of_the_paper() -> None:
    """Sum of stage times plus (K-1) times the slowest; one replica leaves only the transfers."""
    task = request(8, dp=1, encoder_tp=1, llm_tp=1, microbatch_sizes=(4,))
    plan = search_plans(task).best
    times = [stage.time_ms for stage in plan.stages]
    bare = sum(times) + (plan.num_microbatches - 1) * max(times)
    assert bare < plan.iteration_ms < 1.05 * bare


def test_head_weighs_in_the_partition() -> None:
    plan = search_plans(request(dp=1, encoder_tp=1, llm_tp=1, llm_stages=4)).best
    counts = [stop - start for start, stop in plan.llm_layers]
    assert counts[-1] < counts[0]


def test_runnable_only_and_marks() -> None:
    task = request(dp=2)
    marked = search_plans(task, supported=Supported())
    assert any(plan.not_runnable for plan in marked.plans)
    runnable = search_plans(task, supported=Supported(), runnable_only=True)
    assert all(plan.encoder_tp == plan.llm_tp == 1 for plan in runnable.plans)
    assert all(not plan.not_runnable for plan in runnable.plans)


def test_evaluate_decides_among_the_best() -> None:
    task = request()
    plain = search_plans(task)
    wanted = plain.plans[3]
    result = search_plans(
        task, evaluate=lambda plan: 1.0 if plan.digest() == wanted.digest() else 2.0
    )
    assert result.best.digest() == wanted.digest()
    assert result.best.evaluated_ms == 1.0


def test_freezing_shifts_layers_and_memory() -> None:
    full = search_plans(request(dp=1, encoder_tp=1, llm_tp=1)).best
    frozen = search_plans(
        request(dp=1, encoder_tp=1, llm_tp=1, training=Training(encoder="frozen"))
    ).best
    assert frozen.encoder_stages < full.encoder_stages
    assert all(s.backward_ms == 0 for s in frozen.stages[: frozen.encoder_stages - 1])
    lora = search_plans(
        request(dp=1, encoder_tp=1, llm_tp=1, training=Training(encoder="lora", llm="lora"))
    ).best
    assert sum(s.state_gib for s in lora.stages) < 0.4 * sum(s.state_gib for s in full.stages)


def test_recomputation_trades_time_for_memory() -> None:
    fixed = {"dp": 1, "encoder_tp": 1, "llm_tp": 1, "encoder_stages": 8, "microbatch_sizes": (4,)}
    plain = search_plans(request(**fixed)).best
    again = search_plans(request(**fixed, training=Training(recompute=True))).best
    assert sum(s.activation_gib for s in again.stages) < 0.2 * sum(
        s.activation_gib for s in plain.stages
    )
    assert again.iteration_ms > plain.iteration_ms
    first, slower = plain.stages[1], again.stages[1]
    assert slower.backward_ms == pytest.approx(first.backward_ms + first.forward_ms)


def test_equal_samples_and_one_sample() -> None:
    base = request()
    one = base.table.take(np.array([0]))
    equal = base.table.take(np.zeros(50, dtype=int))
    best = [search_plans(replace(base, table=table)).best for table in (one, equal)]
    assert best[0].digest() == best[1].digest()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpus": 1}, InfeasiblePlanError, "1 GPU for 2 modules"),
        ({"encoder_tp": 3}, ConfigError, "num_heads 16"),
        ({"llm_tp": 16}, ConfigError, "num_kv_heads 8"),
        ({"encoder_tp": 16, "gpus": 32}, ConfigError, "8 GPUs of a node"),
        ({"dp": 3}, InfeasiblePlanError, "16 GPUs for dp 3"),
        ({"dp": 0}, ConfigError, "dp is 0"),
        ({"global_batch_size": 0}, ConfigError, "global_batch_size is 0"),
        ({"dp": 2, "global_batch_size": 7}, ConfigError, "7 with dp 2"),
        ({"encoder_stages": 40}, InfeasiblePlanError, "No topology of 16 GPUs"),
    ],
)
def test_bad_input(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_plans(request(**options))


def test_too_large_names_stage_excess_and_remedy() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        search_plans(request(8, model="qwen2_5_vl_72b"))
    text = str(caught.value)
    for part in ("llm layers", "GiB too much", "42.7 GiB usable on a a40", "more GPUs per replica"):
        assert part in text


@pytest.mark.parametrize("model", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_model_has_a_plan(model: str) -> None:
    task = request(64, model=model, gpu="h100", microbatch_sizes=(1, 2))
    assert search_plans(task, num_best=1).best.num_gpus == 64
