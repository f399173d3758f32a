"""From an assignment to its predicted iteration time, by which assignments can be compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.choose import FAMILIES, Choice, choose_schedule
from lightning_entrain.schedule.simulate import Link, StepCosts
from lightning_entrain.schedule.tables import MaxBytes
from lightning_entrain.schedule.types import Placement, RowCounts, row_counts
from lightning_entrain.workload.sizes import SampleSize


def replica_step(
    assignment: Assignment,
    replica: int,
    placement: Placement,
    stage_shares: Sequence[float],
    *,
    sizes: Sequence[SampleSize] | None = None,
    input_factor: float = 1.0,
    weight_factor: float = 1.0,
    stage_factors: Sequence[tuple[float, float, float]] | None = None,
    overhead_ms: float = 0.0,
) -> tuple[RowCounts, StepCosts]:
    """Rows and costs of one replica of an assignment that knows its samples' costs.

    Args:
        assignment: With costs, as from ``assign_samples`` or ``with_costs``.
        replica: Which of its replicas.
        placement: Which stages belong to which module.
        stage_shares: Part of its module's work that each stage does.
        sizes: Sizes by global-batch index. Without them a microbatch has one row per sample: right
            for what is empty and what is not, but not for transfers.
        input_factor: Time of I over that of F.
        weight_factor: Time of W over that of F.
        stage_factors: Per stage the times of F, I and W over its part of the load, where the
            load is not forward time alone or not all stages are trained.
        overhead_ms: Added to every action.

    Raises:
        ScheduleError: If the assignment does not know its costs.
    """
    if assignment.encoder_cost is None:
        raise ScheduleError(
            "The assignment does not know its samples' costs", remedy="call with_costs first"
        )
    own = assignment.replicas[replica]
    segments = own.segments()
    if sizes is not None:
        rows = row_counts(own, sizes)
    else:
        counts = {segment: len(members) for segment, members in segments.items()}
        rows = RowCounts(
            encoder=tuple(map(len, own.encoder)),
            llm=tuple(map(len, own.llm)),
            segments=counts,
            segment_patches=counts,
        )
    cost = assignment.encoder_cost
    costs = StepCosts.from_loads(
        placement,
        assignment.encoder_loads(replica).tolist(),
        assignment.llm_loads(replica).tolist(),
        stage_shares,
        input_factor=input_factor,
        weight_factor=weight_factor,
        stage_factors=stage_factors,
        segment_shares={s: float(sum(cost[i] for i in own)) for s, own in segments.items()},
        overhead_ms=overhead_ms,
    )
    return rows, costs


def choose_for_replicas(
    assignment: Assignment,
    placement: Placement,
    stage_shares: Sequence[float],
    *,
    sizes: Sequence[SampleSize] | None = None,
    input_factor: float = 1.0,
    weight_factor: float = 1.0,
    stage_factors: Sequence[tuple[float, float, float]] | None = None,
    overhead_ms: float = 0.0,
    max_bytes: MaxBytes = None,
    link: Link | None = None,
    families: Collection[str] = FAMILIES,
    profile: Sequence[float] | None = None,
    may_reorder: bool = True,
    num_steps: int = 1000,
    seed: int = 0,
) -> tuple[Choice, ...]:
    """The fastest schedule of every replica; the slowest of them sets the step.

    Arguments are those of :func:`replica_step` and ``choose.choose_schedule``. Activation bytes are
    counted in mean microbatches of a rank.

    Raises:
        ScheduleError: If no schedule fits the memory.
    """
    choices = []
    for replica in range(len(assignment.replicas)):
        rows, costs = replica_step(
            assignment,
            replica,
            placement,
            stage_shares,
            sizes=sizes,
            input_factor=input_factor,
            weight_factor=weight_factor,
            stage_factors=stage_factors,
            overhead_ms=overhead_ms,
        )
        fits_profile = profile is not None and len(profile) == rows.num_microbatches
        choices.append(
            choose_schedule(
                placement,
                rows,
                costs,
                max_bytes=max_bytes,
                link=link,
                families=families,
                profile=profile if fits_profile else None,
                may_reorder=may_reorder,
                num_steps=num_steps,
                seed=seed,
            )
        )
    return tuple(choices)


def iteration_objective(
    placement: Placement,
    stage_shares: Sequence[float],
    *,
    overhead_ms: float = 0.0,
    max_bytes: MaxBytes = None,
    families: Collection[str] = FAMILIES,
    num_steps: int = 200,
    seed: int = 0,
) -> Callable[[Assignment], float]:
    """Score for ``assign_samples(objective=...)``: predicted time of the slowest replica.

    Infinite where no schedule fits the memory, so that another assignment is taken.
    """

    def score(assignment: Assignment) -> float:
        try:
            choices = choose_for_replicas(
                assignment,
                placement,
                stage_shares,
                overhead_ms=overhead_ms,
                max_bytes=max_bytes,
                families=families,
                num_steps=num_steps,
                seed=seed,
            )
        except ScheduleError:
            return float("inf")
        return max((choice.simulation.iteration_ms for choice in choices), default=0.0)

    return score
