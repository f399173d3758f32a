"""Compiled layers: as on one process, compiled once for all shapes, and no split backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_entrain.data.batch import DataNeeds
from lightning_entrain.errors import ConfigError
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.runtime.compiled import CompiledLayers
from lightning_entrain.runtime.step_plan import StepPlanner
from lightning_entrain.schedule.types import ActionKind, Placement
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Batches, Job, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal
from tests.models.helpers import make_batch

JOB = Job(num_batches=2, batch_size=12, num_microbatches=4, policy="entrain", validate=True)


def test_compiled_stages(tmp_path: Path) -> None:
    one = JOB.fit(None, 1, tmp_path).to_numpy()
    options: dict[str, Any] = {
        "llm_stages": 2,
        "schedule": "1f1b_split",
        "compile": True,
        "compile_backend": "aot_eager",
    }
    job = replace(JOB, model={"llm_recompute": "mlp"})
    ranks = run_ranks(3, fit_on_rank, job, options, 3, tmp_path, timeout=120.0)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)


def test_layers_of_a_kind_are_compiled_once_for_all_shapes() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    batches = [
        make_batch(([[0, 1], [2]], [[0], [1, 2]]), rows=[0, 1, 4]),
        make_batch(([[1, 0], [2, 3]], [[0, 1], [2, 3]]), rows=[5, 6, 2, 0]),
    ]
    model = nano_vlm(encoder_layers=4, llm_layers=4)
    plain = [model(batch).item() for batch in batches]
    torch._dynamo.reset()
    compiled = CompiledLayers(model, backend)
    for batch, expected in zip(batches, plain, strict=True):
        loss = model(batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    # MLP and norm of each module, the merger and the last norm: not one for each of 8 layers.
    assert 1 < len(graphs) <= 8
    compiled.remove()
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    model(batches[0])
    assert len(graphs) <= 8


def test_schedules_that_split_backward_are_refused_or_left_out() -> None:
    with pytest.raises(ConfigError, match=r"'zero_bubble' with compile=True.*schedule='auto'"):
        EntrainStrategy(schedule="zero_bubble", compile=True)
    batch = Batches(JOB, 1, DataNeeds.everything())[0]
    planner = StepPlanner(
        placement=Placement.one_per_rank(1, 2),
        replica=0,
        schedule="auto",
        boundary_columns=(24, 24),
        dtype="float32",
        stage_shares=(1.0, 0.5, 0.5),
        may_split=True,
    )
    for may_split in (True, False):
        plan = replace(planner, may_split=may_split)(batch.assignment, batch.sizes, train=True)
        kinds = {a.kind for own in plan.program.schedule.ranks for a in own}
        assert (ActionKind.W in kinds) is may_split
    assert EntrainStrategy(compile=True)._run_plan.may_split is False
