"""What other policies would have cost on the batches that were trained, by the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import EntrainError
from lightning_entrain.observe.predicted import THIRDS
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.predict import choose_for_replicas, replica_step
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.types import Placement, RowCounts, Schedule
from lightning_entrain.workload.sizes import SampleSize

COMPARED = ("fixed", "disttrain", "entrain")
"""Policies that every run is compared with."""

Builder = Callable[[Placement, RowCounts], Schedule]


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
    """

    step_ms: float
    encoder_cv: float
    llm_cv: float


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the batches ran on.

    Attributes:
        placement: Stages and ranks of a replica.
        stage_shares: Part of its module's work that each stage does.
        schedule: Builder of the run's schedule; None for the fastest of all.
        stage_factors: Parts of a stage's work that F, I and W do; thirds if None.
    """

    placement: Placement
    stage_shares: Sequence[float]
    schedule: Builder | None = None
    stage_factors: Sequence[tuple[float, float, float]] | None = None


def as_trained(batches: Sequence[TrainedBatch], pipeline: Pipeline) -> PolicyOutcome:
    """The run's own assignments with its own schedule."""
    return _mean(
        [
            _outcome(batch.assignment, batch.sizes, pipeline, pipeline.schedule, ())
            for batch in batches
        ]
    )


def compare_policies(
    batches: Sequence[TrainedBatch], pipeline: Pipeline, policies: Sequence[str] = COMPARED
) -> dict[str, PolicyOutcome]:
    """The same batches on the same stages under other policies.

    ``entrain`` runs with deferral and the fastest of 1F1B, split-backward and eager forward, as in
    the paper; the others with 1F1B. Policies that cannot assign a batch are left out.

    Args:
        batches: Some of the batches that were trained.
        pipeline: Stages.
        policies: Names of policies.
    """
    found = {}
    for policy in policies:
        try:
            outcomes = [_under(policy, batch, pipeline) for batch in batches]
        except EntrainError:
            continue
        found[policy] = _mean(outcomes)
    return found


def _under(policy: str, batch: TrainedBatch, pipeline: Pipeline) -> PolicyOutcome:
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
    paper = policy == "entrain"
    return _outcome(
        assignment, batch.sizes, pipeline, None if paper else build_1f1b, ("1f1b",) if paper else ()
    )


def _outcome(
    assignment: Assignment,
    sizes: Sequence[SampleSize],
    pipeline: Pipeline,
    build: Builder | None,
    families: Sequence[str],
) -> PolicyOutcome:
    factors = pipeline.stage_factors or [THIRDS] * len(pipeline.stage_shares)
    if build is None:
        options = {"families": families} if families else {}
        choices = choose_for_replicas(
            assignment,
            pipeline.placement,
            pipeline.stage_shares,
            sizes=sizes,
            stage_factors=factors,
            may_reorder=False,
            num_steps=300,
            **options,  # type: ignore[arg-type]
        )
        times = [choice.simulation.iteration_ms for choice in choices]
    else:
        times = []
        for replica in range(len(assignment.replicas)):
            rows, costs = replica_step(
                assignment,
                replica,
                pipeline.placement,
                pipeline.stage_shares,
                sizes=sizes,
                stage_factors=factors,
            )
            times.append(simulate(build(pipeline.placement, rows), costs, rows).iteration_ms)
    return PolicyOutcome(
        step_ms=max(times, default=0.0),
        encoder_cv=assignment.imbalance("encoder").cv,
        llm_cv=assignment.imbalance("llm").cv,
    )


def _mean(outcomes: Sequence[PolicyOutcome]) -> PolicyOutcome:
    count = max(len(outcomes), 1)
    return PolicyOutcome(
        step_ms=math.fsum(o.step_ms for o in outcomes) / count,
        encoder_cv=math.fsum(o.encoder_cv for o in outcomes) / count,
        llm_cv=math.fsum(o.llm_cv for o in outcomes) / count,
    )
