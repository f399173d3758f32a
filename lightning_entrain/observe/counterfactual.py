"""What other policies would have cost on the batches that were trained, by the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import EntrainError, ScheduleError
from lightning_entrain.observe.predicted import THIRDS
from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import Placement, RowCounts, Schedule, row_counts
from lightning_entrain.workload.sizes import SampleSize

COMPARED = ("fixed", "disttrain", "entrain")
"""Policies that every run is compared with."""

RunSchedule = Callable[[Assignment, int, Sequence[SampleSize]], Schedule]
"""Makes the schedule that the run itself uses for a replica of an assignment."""

SCHEDULE_TEXTS = {
    "1f1b": "1F1B",
    "1f1b_split": "1F1B with backward by segment",
    "1f1b_eager": "1F1B with backward by segment and eager forwards",
    "zero_bubble": "zero bubble",
    "auto": "the fastest of all, chosen per step",
}
"""The run's schedule in words, by its name."""

_PLAIN = "1F1B"
_DEFERRAL = "1F1B with deferral"


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """A global batch as it was trained.

    Attributes:
        assignment: With costs of forward and backward in milliseconds.
        sizes: By global-batch index.
    """

    assignment: Assignment
    sizes: Sequence[SampleSize]


@dataclass(frozen=True, kw_only=True)
class PolicyOutcome:
    """Means over the batches.

    Attributes:
        step_ms: Simulated time of the slowest replica, in the cost model's milliseconds.
        encoder_cv: Spread of the encoder microbatches' loads.
        llm_cv: The same of the LLM's.
        schedule: What the batches were scheduled by, in words.
    """

    step_ms: float
    encoder_cv: float
    llm_cv: float
    schedule: str = ""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the batches ran on.

    Attributes:
        placement: Stages and ranks of a replica.
        stage_shares: Part of its module's work that each stage does.
        schedule: Makes the run's own schedule.
        schedule_name: Its name, for example ``zero_bubble`` or ``auto``.
        stage_factors: Parts of a stage's work that F, I and W do; thirds if None.
        max_live: Activations a rank may hold, in mean microbatches of a stage; None for no limit.
    """

    placement: Placement
    stage_shares: Sequence[float]
    schedule: RunSchedule
    schedule_name: str
    stage_factors: Sequence[tuple[float, float, float]] | None = None
    max_live: float | None = None

    @property
    def schedule_text(self) -> str:
        """The run's schedule in words."""
        return SCHEDULE_TEXTS.get(self.schedule_name, self.schedule_name)


def as_trained(batches: Sequence[TrainedBatch], pipeline: Pipeline) -> PolicyOutcome:
    """The run's own assignments with its own schedule."""
    return _mean([_own(batch, pipeline) for batch in batches])


def in_sampler_order(batches: Sequence[TrainedBatch], pipeline: Pipeline) -> PolicyOutcome:
    """Policy ``fixed`` with the run's own choice of schedule: sets both parts of a gain apart."""
    return _mean([_own(_assigned("fixed", batch, pipeline), pipeline) for batch in batches])


def compare_policies(
    batches: Sequence[TrainedBatch],
    pipeline: Pipeline,
    policies: Sequence[str] = COMPARED,
    *,
    own: PolicyOutcome | None = None,
) -> dict[str, PolicyOutcome]:
    """The same batches on the same stages under each policy with the schedule it comes with.

    ``fixed`` and ``disttrain`` run 1F1B; ``entrain`` runs 1F1B with deferral: plain, with backward
    by segment or with eager forwards, whichever is the fastest in the memory that the run's plan
    allows (Entrain, section 5.3, arXiv 2605.27918). The policy that the run used is not assigned
    again: it is the run as it was, with the run's own schedule, and so equals :func:`as_trained`.
    Policies that cannot assign a batch are left out.

    Args:
        batches: Some of the batches that were trained.
        pipeline: Stages.
        policies: Names of policies.
        own: What :func:`as_trained` returned, if it is known already.
    """
    found = {}
    for policy in policies:
        if all(batch.assignment.policy == policy for batch in batches):
            found[policy] = own or as_trained(batches, pipeline)
            continue
        try:
            found[policy] = _mean([_under(policy, batch, pipeline) for batch in batches])
        except EntrainError:
            continue
    return found


def _own(batch: TrainedBatch, pipeline: Pipeline) -> PolicyOutcome:
    def schedule_of(replica: int) -> Schedule:
        return pipeline.schedule(batch.assignment, replica, batch.sizes)

    return _outcome(
        batch.assignment, batch.sizes, pipeline, schedule_of, text=pipeline.schedule_text
    )


def _assigned(policy: str, batch: TrainedBatch, pipeline: Pipeline) -> TrainedBatch:
    """The same samples by another policy."""
    own = batch.assignment
    num_replicas = len(own.replicas)
    options = {"num_stages": pipeline.placement.num_ranks} if policy == "disttrain" else {}
    assignment = assign_samples(
        list(own.encoder_cost or ()),
        list(own.llm_cost or ()),
        num_replicas=num_replicas,
        num_microbatches=max(r.num_microbatches for r in own.replicas),
        policy=policy,
        max_lag=int(policy == "entrain"),
        equal_counts=len(batch.sizes) % num_replicas == 0,
        **options,  # type: ignore[arg-type]
    )
    return TrainedBatch(assignment=assignment, sizes=batch.sizes)


def _under(policy: str, batch: TrainedBatch, pipeline: Pipeline) -> PolicyOutcome:
    assignment = _assigned(policy, batch, pipeline).assignment
    if policy == "entrain":
        return _with_deferral(assignment, batch.sizes, pipeline)

    def schedule_of(replica: int) -> Schedule:
        rows = row_counts(assignment.replicas[replica], batch.sizes)
        return build_1f1b(pipeline.placement, rows)

    return _outcome(assignment, batch.sizes, pipeline, schedule_of, text=_PLAIN)


def _with_deferral(
    assignment: Assignment, sizes: Sequence[SampleSize], pipeline: Pipeline
) -> PolicyOutcome:
    """Each replica by the fastest kind of 1F1B."""

    def schedule_of(replica: int) -> Schedule:
        rows, costs = _step(assignment, replica, sizes, pipeline)
        try:
            return choose_schedule(
                pipeline.placement,
                rows,
                costs,
                max_bytes=pipeline.max_live,
                families=("1f1b",),
                may_reorder=False,
            ).tuned.schedule
        except ScheduleError:  # so uneven that none keeps to the limit: as the runtime does
            return build_1f1b(pipeline.placement, rows, split_backward=True)

    return _outcome(assignment, sizes, pipeline, schedule_of, text=_DEFERRAL)


def _outcome(
    assignment: Assignment,
    sizes: Sequence[SampleSize],
    pipeline: Pipeline,
    schedule_of: Callable[[int], Schedule],
    *,
    text: str,
) -> PolicyOutcome:
    times = []
    for replica in range(len(assignment.replicas)):
        rows, costs = _step(assignment, replica, sizes, pipeline)
        times.append(simulate(schedule_of(replica), costs, rows).iteration_ms)
    return PolicyOutcome(
        step_ms=max(times, default=0.0),
        encoder_cv=assignment.imbalance("encoder").cv,
        llm_cv=assignment.imbalance("llm").cv,
        schedule=text,
    )


def _step(
    assignment: Assignment, replica: int, sizes: Sequence[SampleSize], pipeline: Pipeline
) -> tuple[RowCounts, StepCosts]:
    return replica_step(
        assignment,
        replica,
        pipeline.placement,
        pipeline.stage_shares,
        sizes=sizes,
        stage_factors=pipeline.stage_factors or [THIRDS] * len(pipeline.stage_shares),
    )


def _mean(outcomes: Sequence[PolicyOutcome]) -> PolicyOutcome:
    count = max(len(outcomes), 1)
    return PolicyOutcome(
        step_ms=math.fsum(o.step_ms for o in outcomes) / count,
        encoder_cv=math.fsum(o.encoder_cv for o in outcomes) / count,
        llm_cv=math.fsum(o.llm_cv for o in outcomes) / count,
        schedule=outcomes[0].schedule if outcomes else "",
    )
