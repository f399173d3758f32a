"""What a rank keeps alive, in microbatches and in bytes, is what the verifier and simulator say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import Action, ActionKind
from lightning_entrain.schedule.verify import peak_live
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.held_bytes import HeldBytes
from tests.distributed.job import Module
from tests.distributed.ranks import run_ranks
from tests.distributed.test_matrix import MatrixJob

SCHEDULES = ("1f1b", "1f1b_split", "1f1b_eager", "zero_bubble", "auto")


@dataclass
class Peaks:
    """Of one step on one rank.

    Attributes:
        schedule: Name of the schedule.
        live: Per own stage, microbatches with F begun and B (or W) not ended.
        live_of_rank: The same over all its stages.
        num_bytes: Bytes kept for backward.
        expected_live: As simulated.
        expected_live_of_rank: As verified.
        bound: Simulated bytes, from what each microbatch keeps after its F.
        left: Bytes kept at the end of the step.
        has_weights: Whether the rank's list holds W.
        whole: Whether it holds neither W nor the B of a segment.
    """

    schedule: str
    live: dict[int, int] = field(default_factory=dict)
    live_of_rank: int = 0
    num_bytes: int = 0
    expected_live: dict[int, int] = field(default_factory=dict)
    expected_live_of_rank: int = 0
    bound: float = 0.0
    left: int = 0
    has_weights: bool = False
    whole: bool = False


class Measured(Module):
    """Runs every batch under each schedule in turn; the first tells what a microbatch keeps."""

    def on_train_start(self) -> None:
        self.peaks: list[Peaks] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy = self.trainer.strategy
        assert isinstance(strategy, EntrainStrategy)
        engine = strategy._engine
        assert engine is not None
        constant = [*self.parameters(), *self.buffers(), *batch.pixels.values()]
        meter = HeldBytes([*constant, *batch.input_ids.values(), *batch.labels.values()])
        kept: dict[tuple[int, int], int] = {}
        plain = engine._executor._execute
        losses = []
        for name in SCHEDULES:
            peaks = Peaks(name)

            def execute(action: Action, state: Any, recorder: Any, peaks: Peaks = peaks) -> None:
                before = meter.now(state)
                with meter.saving():
                    plain(action, state, recorder)
                if not action.kind.is_compute:
                    return
                after = meter.now(state)
                if action.kind is ActionKind.F:
                    kept.setdefault((action.stage, action.microbatch), after - before)
                peaks.num_bytes = max(peaks.num_bytes, after)
                held = {piece[:2] for piece in (*state.outputs, *state.weights)}
                for stage in range(state.graph.last + 1):
                    live = sum(key[0] == stage for key in held)
                    peaks.live[stage] = max(peaks.live.get(stage, 0), live)
                peaks.live_of_rank = max(peaks.live_of_rank, len(held))
                peaks.left = after

            engine._executor._execute = execute  # type: ignore[method-assign]
            planner = replace(engine._planner, schedule=name)
            plan = batch.step_plan = planner(batch.assignment, batch.sizes, train=True)
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            self._expect(peaks, plan, kept)
            self.peaks.append(peaks)
        engine._executor._execute = plain  # type: ignore[method-assign]
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-5)
        return loss

    def _expect(self, peaks: Peaks, plan: Any, kept: dict[tuple[int, int], int]) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, EntrainStrategy)
        rank = strategy.global_rank % strategy.layout.num_ranks
        schedule = plan.program.schedule
        shape = schedule.placement.num_stages, plan.rows.num_microbatches
        table = np.zeros(shape)
        for key, num_bytes in kept.items():
            table[key] = num_bytes
        ones = np.ones(shape)
        costs = StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones, activation_bytes=table)
        compute = [tuple(a for a in own if a.kind.is_compute) for own in schedule.ranks]
        found = simulate(replace(schedule, ranks=tuple(compute)), costs, plan.rows)
        own = schedule.placement.stages_of(rank)
        listed = compute[rank]
        peaks.has_weights = any(a.kind is ActionKind.W for a in listed)
        peaks.whole = not peaks.has_weights and all(a.target is None for a in listed)
        peaks.expected_live = {stage: found.peak_live[stage] for stage in own}
        peaks.expected_live_of_rank = peak_live(schedule, plan.rows)[rank]
        peaks.bound = found.peak_bytes[rank]
        peaks.live = {stage: n for stage, n in peaks.live.items() if stage in own}


class MeasuredJob(MatrixJob):
    def module(self) -> Module:
        return Measured(super().module().model, self)


def _fit(job: MatrixJob, root: Path) -> list[Peaks]:
    module = job.module()
    trainer = job.make_trainer(job.strategy(), job.devices, root)
    trainer.fit(module, job.loader(trainer, module))
    assert isinstance(module, Measured)
    return module.peaks


JOB = MeasuredJob(schedule="auto", num_batches=1, batch_size=16, num_microbatches=6)
ONE_TWO, TWO_TWO = (1, 1, 2, (0, 1, 2)), (1, 2, 2, (0, 1, 2, 3))
CASES = [
    pytest.param(replace(JOB, layout=TWO_TWO), id="2+2, fixed"),
    pytest.param(replace(JOB, layout=ONE_TWO, policy="entrain", text_only=0.0), id="1+2, deferral"),
    pytest.param(
        replace(JOB, layout=ONE_TWO, model={"encoder_recompute": "full", "llm_recompute": "full"}),
        id="1+2, recompute",
    ),
    pytest.param(replace(JOB, layout=(1, 2, 2, (0, 1, 1, 0))), id="V-shaped"),
]


@pytest.mark.parametrize("job", CASES)
def test_peaks(job: MeasuredJob, tmp_path: Path) -> None:
    recomputes = "encoder_recompute" in job.model
    kinds: set[tuple[bool, bool]] = set()
    for steps in run_ranks(job.devices, _fit, job, tmp_path):
        assert [peaks.schedule for peaks in steps] == list(SCHEDULES)
        for peaks in steps:
            assert peaks.live == peaks.expected_live, peaks
            assert peaks.live_of_rank == peaks.expected_live_of_rank, peaks
            assert peaks.left == 0, peaks
            if peaks.whole:
                assert peaks.num_bytes == peaks.bound, peaks
            elif not (recomputes and peaks.has_weights):
                # Parts of a microbatch are freed before its end, which the bound does not count.
                assert 0.7 * peaks.bound < peaks.num_bytes <= peaks.bound, peaks
            if recomputes and peaks.schedule == "auto":
                assert not peaks.has_weights, "operands kept for W would undo recomputation"
            kinds.add((peaks.whole, peaks.has_weights))
    assert {(True, False), (False, True)} <= kinds or job.layout[3] == (0, 1, 1, 0)
