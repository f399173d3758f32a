"""A random sample of layouts, policies, schedules and options trains as one process does.

Each case is drawn from its number. The first twelve cover every value of every dimension, and run
by default; ENTRAIN_MATRIX_CASES=100 runs more.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_entrain.models.freezing import freeze
from lightning_entrain.plan.layout import LayoutRequest, StageLayout
from lightning_entrain.runtime.state import StepState
from lightning_entrain.schedule.types import Action, ActionKind, Placement
from lightning_entrain.schedule.verify import peak_live
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import relative

NUM_CASES = int(os.environ.get("ENTRAIN_MATRIX_CASES", "12"))
POLICIES = ("fixed", "disttrain", "entrain", "joint")
SCHEDULES = ("1f1b", "1f1b_split", "1f1b_eager", "zero_bubble", "auto")
# Replicas, encoder stages, LLM stages, rank of each stage.
LAYOUTS = (
    (1, 1, 1, (0, 1)),
    (1, 1, 2, (0, 1, 2)),
    (1, 2, 1, (0, 1, 2)),
    (1, 2, 2, (0, 1, 2, 3)),
    (2, 1, 1, (0, 1)),
    (1, 2, 2, (0, 1, 0, 1)),  # both modules on both ranks
    (1, 2, 3, (0, 1, 1, 0, 1)),
    (1, 2, 2, (0, 1, 1, 2)),  # the modules share the rank at their boundary
    (2, 2, 2, (0, 0, 0, 0)),
    (2, 2, 2, (0, 1, 1, 0)),  # V-shaped
)


@dataclass(frozen=True, kw_only=True)
class PlacedRequest(LayoutRequest):
    """Even stages on given ranks, which may hold several."""

    stage_to_rank: tuple[int, ...]

    def ranks_per_replica(self) -> int:
        return len(set(self.stage_to_rank))

    def resolve(self, **options: Any) -> StageLayout:
        assert self.encoder_stages is not None
        assert self.llm_stages is not None
        one_process = LayoutRequest(
            world_size=self.replicas,
            replicas=self.replicas,
            encoder_stages=self.encoder_stages,
            llm_stages=self.llm_stages,
        )
        placement = Placement(
            num_encoder_stages=self.encoder_stages,
            num_llm_stages=self.llm_stages,
            stage_to_rank=self.stage_to_rank,
        )
        return replace(one_process.resolve(**options), placement=placement)


@dataclass(kw_only=True)
class MatrixJob(Job):
    """One point of the matrix."""

    layout: tuple[int, int, int, tuple[int, ...]] = LAYOUTS[0]
    schedule: str = "1f1b"
    frozen: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.layout[0] * len(set(self.layout[3]))

    def module(self) -> Module:
        model = super().module().model
        freeze(model, self.frozen)
        return Watched(model, self)

    def strategy(self) -> EntrainStrategy:
        replicas, encoder, llm, stage_to_rank = self.layout
        strategy = EntrainStrategy(replicas=replicas, schedule=self.schedule, **self.options)
        strategy._run_plan.wish = PlacedRequest(
            world_size=self.devices,
            replicas=replicas,
            encoder_stages=encoder,
            llm_stages=llm,
            stage_to_rank=stage_to_rank,
        )
        if self.schedule == "auto":  # the layers are alike
            strategy._run_plan._stage_shares = (1 / encoder,) * encoder + (1 / llm,) * llm
        return strategy


class Watched(Module):
    """Compares what a rank keeps alive with what the verifier says it does."""

    def on_train_start(self) -> None:
        self.peaks: list[tuple[int, int]] = []
        self.live = 0
        strategy = self.trainer.strategy
        if not isinstance(strategy, EntrainStrategy):
            return
        assert strategy._engine is not None
        executor = strategy._engine._executor
        plain = executor._execute

        def execute(action: Action, state: StepState, recorder: Any) -> None:
            plain(action, state, recorder)
            held = {piece[:2] for piece in (*state.outputs, *state.weights)}
            assert all(state.graph.needs_backward(stage) for stage, _ in held)
            # What a stage without backward holds is gone once its forward is over.
            passing = action.kind is ActionKind.F and not state.graph.needs_backward(action.stage)
            self.live = max(self.live, len(held) + passing)

        executor._execute = execute  # type: ignore[method-assign]

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, EntrainStrategy):
            plan = strategy.last_step_plan
            assert plan is not None
            rank = strategy.global_rank % strategy.layout.num_ranks
            self.peaks.append((self.live, peak_live(plan.program.schedule, plan.rows)[rank]))
            self.live = 0


def draw(number: int) -> MatrixJob:
    """The case of a number."""
    chance = random.Random(number + 7)
    trainer: dict[str, Any] = {}
    if chance.random() < 0.3:
        trainer["accumulate_grad_batches"] = chance.choice((2, 3))
    if chance.random() < 0.4:
        trainer["gradient_clip_val"] = chance.choice((0.03, 0.3))
        trainer["gradient_clip_algorithm"] = chance.choice(("norm", "value"))
    if chance.random() < 0.2:
        trainer["precision"] = "bf16-mixed"
    return MatrixJob(
        # The first cases go through layouts, policies and schedules in turn.
        layout=LAYOUTS[number % len(LAYOUTS)],
        policy=POLICIES[number % len(POLICIES)],
        schedule=SCHEDULES[(number + number // len(SCHEDULES)) % len(SCHEDULES)],
        frozen=chance.choice(((), (), (), ("encoder",), ("llm",))),
        num_batches=chance.randint(3, 5),
        batch_size=2 * chance.randint(3, 6),
        num_microbatches=chance.randint(2, 5),
        seed=chance.randrange(1000),
        text_only=chance.choice((0.0, 0.2, 0.6)),
        max_side=chance.choice((80, 120, 300)),
        optimizer=chance.choice(("adamw", "sgd")),
        trainer=trainer,
    )


def _fit(job: MatrixJob, root: Path) -> tuple[Outcome, list[tuple[int, int]]]:
    module: list[Any] = []
    made = job.module()
    job.module = lambda: module.append(made) or made  # type: ignore[method-assign,func-returns-value]
    outcome = job.fit(job.strategy(), job.devices, root).to_numpy()
    return outcome, made.peaks  # type: ignore[attr-defined]


def test_the_first_cases_cover_every_value() -> None:
    cases = [draw(number) for number in range(12)]
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert {case.policy for case in cases} == set(POLICIES)
    assert {case.schedule for case in cases} == set(SCHEDULES)
    options = {(name, value) for case in cases for name, value in case.trainer.items()}
    assert {("precision", "bf16-mixed"), ("gradient_clip_algorithm", "norm")} <= options
    assert any(name == "accumulate_grad_batches" for name, _ in options)
    assert {case.frozen for case in cases} == {(), ("encoder",), ("llm",)}
    assert {case.optimizer for case in cases} == {"adamw", "sgd"}


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_case(number: int, tmp_path: Path) -> None:
    job = draw(number)
    one = draw(number).fit(None, 1, tmp_path).to_numpy()
    low = "precision" in job.trainer
    losses, gradients, parameters = (5e-3, 5e-2, 5e-2) if low else (1e-5, 1e-6, 1e-4)
    seen: set[str] = set()
    for rank, peaks in run_ranks(job.devices, _fit, job, tmp_path):
        np.testing.assert_allclose(rank.losses, one.losses, rtol=losses, err_msg=str(job))
        for name, gradient in rank.first_gradients.items():
            assert relative(gradient, one.first_gradients[name]) < gradients, (name, job)
        for name, parameter in rank.parameters.items():
            assert relative(parameter, one.parameters[name]) < parameters, (name, job)
        seen |= set(rank.first_gradients)
        assert len(peaks) == job.num_batches
        assert all(found == bound for found, bound in peaks), (peaks, job)
    assert seen == set(one.first_gradients), job
