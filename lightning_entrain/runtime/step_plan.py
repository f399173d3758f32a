"""Planning a step: from an assignment to a verified program, ahead of time and in any process."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.runtime.schedules import AUTO, SCHEDULES
from lightning_entrain.schedule.choose import FAMILIES, choose_schedule
from lightning_entrain.schedule.lower import Program, lower
from lightning_entrain.schedule.one_f_one_b import build_forward_only
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.types import Placement, RowCounts, Schedule, row_counts
from lightning_entrain.schedule.verify import verify
from lightning_entrain.workload.sizes import SampleSize


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one replica does in a step.

    Attributes:
        program: Lowered and verified.
        rows: The rows it is for.
        train: Whether it has backward actions.
        predicted_ms: Simulated time of the step, if the planner knows costs.
        planning_ms: How long planning took.
        batch_digest: Of the global batch's assignment and sizes, 56 bits; equal on all ranks.
        program_digest: Of the replica's program, 56 bits; equal on its ranks.
    """

    program: Program
    rows: RowCounts
    train: bool
    predicted_ms: float | None
    planning_ms: float
    batch_digest: int
    program_digest: int


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of one replica. Plain values only, so that loader processes can hold it.

    Attributes:
        placement: Which rank holds which stage.
        replica: The replica of this rank.
        schedule: Name of the training schedule; ``"auto"`` simulates all and takes the fastest.
        boundary_columns: Columns of the tensor between each stage and the next.
        dtype: Name of the type of boundary tensors.
        stage_shares: Part of its module's work that each stage does; None if unknown.
        stage_factors: Parts of a stage's work that F, I and W do.
        may_split: Whether ``"auto"`` may split B into I and W.
        num_steps: Effort of the search of ``"auto"``.
    """

    placement: Placement
    replica: int
    schedule: str
    boundary_columns: tuple[int, ...]
    dtype: str
    stage_shares: tuple[float, ...] | None = None
    stage_factors: tuple[tuple[float, float, float], ...] | None = None
    may_split: bool = True
    num_steps: int = 300

    def __call__(
        self, assignment: Assignment, sizes: Sequence[SampleSize], *, train: bool
    ) -> StepPlan:
        """Plan a step.

        Args:
            assignment: Of the global batch.
            sizes: By global-batch index.
            train: Whether gradients are wanted.

        Raises:
            ScheduleError: If the schedule cannot be built or fails verification.
        """
        begin = time.perf_counter()
        rows = row_counts(assignment.replicas[self.replica], sizes)
        predicted_ms: float | None = None
        if not train:
            schedule = build_forward_only(self.placement, rows)
        else:
            schedule, predicted_ms = self.train_schedule(assignment, sizes)
        program = lower(schedule, rows, boundary_columns=self.boundary_columns, dtype=self.dtype)
        verify(program, rows)
        return StepPlan(
            program=program,
            rows=rows,
            train=train,
            predicted_ms=predicted_ms,
            batch_digest=_short_hash(f"{assignment.digest()} {size_rows(sizes)}"),
            program_digest=_short_hash(program.schedule.digest()),
            planning_ms=(time.perf_counter() - begin) * 1e3,
        )

    def train_schedule(
        self, assignment: Assignment, sizes: Sequence[SampleSize]
    ) -> tuple[Schedule, float | None]:
        """The schedule of a training step, and its simulated milliseconds where it was simulated.

        Raises:
            ScheduleError: If the schedule cannot be built.
        """
        if self.schedule == AUTO and self._knows_costs(assignment):
            return self._fastest(assignment, sizes)
        name = "1f1b_split" if self.schedule == AUTO else self.schedule
        rows = row_counts(assignment.replicas[self.replica], sizes)
        return SCHEDULES[name](self.placement, rows), None

    def _knows_costs(self, assignment: Assignment) -> bool:
        return self.stage_shares is not None and assignment.encoder_cost is not None

    def _fastest(
        self, assignment: Assignment, sizes: Sequence[SampleSize]
    ) -> tuple[Schedule, float]:
        assert self.stage_shares is not None
        # The order of the microbatches is the assignment's: batches are packed by then.
        rows, costs = replica_step(
            assignment,
            self.replica,
            self.placement,
            self.stage_shares,
            sizes=sizes,
            stage_factors=self.stage_factors,
        )
        try:
            choice = choose_schedule(
                self.placement,
                rows,
                costs,
                max_bytes=live_cap(self.placement),
                families=FAMILIES if self.may_split else ("1f1b",),
                may_reorder=False,
                num_steps=self.num_steps,
            )
        except ScheduleError:  # microbatches so uneven that no order keeps to the cap
            schedule = SCHEDULES["1f1b_split"](self.placement, rows)
            return schedule, simulate(schedule, costs, rows).iteration_ms
        return choice.tuned.schedule, choice.simulation.iteration_ms


def live_cap(placement: Placement) -> float:
    """Activations a rank may hold, in mean microbatches of a stage.

    One more than 1F1B's busiest rank holds, and the same for every rank: the last ranks need
    weight work held back to fill the drain. Plans reserve memory for as much.
    """
    num = placement.num_stages
    return 1.0 + max(
        sum(num - stage for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )


def size_rows(sizes: Sequence[SampleSize]) -> list[tuple[object, ...]]:
    """The sizes as plain tuples, whose text is quick to make."""
    return [(s.grids, s.num_text_tokens, s.num_label_tokens) for s in sizes]


def _short_hash(text: str) -> int:
    """56 bits of a digest, which fit a signed 64-bit tensor."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
