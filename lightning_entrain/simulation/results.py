"""Many global batches under one policy, summed up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_entrain.assign.measures import Imbalance, imbalance
from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import ConfigError, ScheduleError
from lightning_entrain.schedule.dip import expand_groups
from lightning_entrain.schedule.limits import Limits, step_limits
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.schedule.types import ActionKind
from lightning_entrain.simulation.inputs import GlobalBatch, Machine
from lightning_entrain.simulation.policies import PolicyRunner, ReplicaStep, Step
from lightning_entrain.simulation.stage_plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class ForwardTimes:
    """Forward milliseconds of one replica's microbatches, in the order they run.

    Empty microbatches are left out: they do not run.
    """

    encoder_ms: tuple[float, ...]
    llm_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy over several global batches; times are means over them.

    Attributes:
        policy: Its name.
        schedule: The schedule chosen most often.
        plan: The layout it ran on.
        iteration_ms: Of the slowest replica.
        bottleneck_ms: Work of the busiest rank, were the work spread evenly over replicas.
        ideal_ms: All work spread evenly over all ranks of all replicas.
        bound_ms: What no schedule of these microbatches beats (of the replica that is worst off).
        bubble_ratio: Share of all ranks' time without compute.
        encoder: Spread of the microbatches' forward time in the encoder, in ms.
        llm: Likewise in the LLM.
        peak_live: Per stage, the most microbatches in flight.
        peak_gib: Per rank, the most memory.
        peak_mean: Most activations on a rank, in mean microbatches.
        planning_ms: Median per step.
        num_microbatches: Mean per replica.
        microbatch_counts: Fewest and most that a replica ran; `entrain` and `joint` may take fewer
            than they are given where the heaviest sample would outweigh the others.
        iterations_ms: Per batch.
        timelines: Of each replica in the first batch.
        forward_times: Of the slowest replica in the first batch.
        slowest: Which replica that is.
    """

    policy: str
    schedule: str
    plan: StagePlan
    iteration_ms: float
    bottleneck_ms: float
    ideal_ms: float
    bound_ms: float
    bubble_ratio: float
    encoder: Imbalance
    llm: Imbalance
    peak_live: tuple[int, ...]
    peak_gib: tuple[float, ...]
    peak_mean: float
    planning_ms: float
    num_microbatches: float
    microbatch_counts: tuple[int, int]
    iterations_ms: tuple[float, ...]
    timelines: tuple[Timeline, ...]
    forward_times: ForwardTimes
    slowest: int

    @property
    def counts_text(self) -> str:
        """Microbatches per replica: one number, or the fewest and the most."""
        fewest, most = self.microbatch_counts
        return f"{most}" if fewest == most else f"{fewest}-{most}"

    @property
    def over_ideal(self) -> float:
        """Iteration / ideal."""
        return self.iteration_ms / self.ideal_ms if self.ideal_ms else 1.0

    @property
    def over_bottleneck(self) -> float:
        """Iteration / bottleneck."""
        return self.iteration_ms / self.bottleneck_ms if self.bottleneck_ms else 1.0

    def to_json(self) -> dict[str, object]:
        """The record of `simulation.json`, times in milliseconds."""
        return {
            "policy": self.policy,
            "schedule": self.schedule,
            "encoder_stages": len(self.plan.encoder_layers),
            "llm_stages": len(self.plan.llm_layers),
            "num_microbatches": list(self.microbatch_counts),
            "iteration_time": self.iteration_ms,
            "bottleneck_time": self.bottleneck_ms,
            "ideal_time": self.ideal_ms,
            "bound_time": self.bound_ms,
            "bubble_ratio": self.bubble_ratio,
            "encoder_std": self.encoder.std,
            "llm_std": self.llm.std,
            "encoder_cv": self.encoder.cv,
            "llm_cv": self.llm.cv,
            "peak_live_microbatches": list(self.peak_live),
            "planning_ms": self.planning_ms,
        }


def run_policy(
    runner: PolicyRunner, batches: Sequence[GlobalBatch], *, warm_up: bool = True
) -> PolicyResult:
    """Simulate all batches.

    Args:
        runner: The policy on its plan.
        batches: At least one.
        warm_up: Plan the first batch twice, so that compilation does not count as planning.

    Raises:
        ConfigError: If no schedule fits the memory; says the least that would do.
    """
    try:
        if warm_up:
            runner.run(batches[0])
        steps = [runner.run(batch) for batch in batches]
    except ScheduleError as error:
        raise _too_little(runner, batches, error) from error
    limits = [_limits(runner, step) for step in steps]
    busy = [sum(sum(r.simulation.busy_ms) for r in step.replicas) for step in steps]
    num_ranks = runner.plan.placement.num_ranks * runner.machine.num_replicas
    replicas = [replica for step in steps for replica in step.replicas]
    names = Counter(replica.name for replica in replicas)
    spreads = [_spreads(runner, step.assignment) for step in steps]
    counts = [len(r.llm) for step in steps for r in step.assignment.replicas]
    first = steps[0]
    return PolicyResult(
        policy=runner.policy,
        schedule=names.most_common(1)[0][0],
        plan=runner.plan,
        iteration_ms=_mean(step.iteration_ms for step in steps),
        bottleneck_ms=_mean(own.bottleneck_ms for own in limits),
        ideal_ms=_mean(own.ideal_ms for own in limits),
        bound_ms=_mean(own.bound_ms for own in limits),
        bubble_ratio=_mean(
            1 - work / (num_ranks * step.iteration_ms) if step.iteration_ms else 0.0
            for work, step in zip(busy, steps, strict=True)
        ),
        encoder=_mean_imbalance([pair[0] for pair in spreads]),
        llm=_mean_imbalance([pair[1] for pair in spreads]),
        peak_live=tuple(np.max([r.simulation.peak_live for r in replicas], axis=0).tolist()),
        peak_gib=tuple(np.max([runner.rank_gib(r) for r in replicas], axis=0).tolist()),
        peak_mean=max(_peak_mean(step) for step in steps),
        planning_ms=statistics.median(step.planning_ms for step in steps),
        num_microbatches=_mean(counts),
        microbatch_counts=(min(counts), max(counts)),
        iterations_ms=tuple(step.iteration_ms for step in steps),
        timelines=tuple(replica.simulation.timeline for replica in first.replicas),
        forward_times=_forward_times(first.replicas[first.slowest], runner.plan),
        slowest=first.slowest,
    )


def _peak_mean(step: Step) -> float:
    """Sub-microbatches count as the part of a microbatch that they are."""
    return max(
        max(own.simulation.peak_bytes) * replica.num_microbatches / own.rows.num_microbatches
        for own, replica in zip(step.replicas, step.assignment.replicas, strict=True)
    )


def _limits(runner: PolicyRunner, step: Step) -> Limits:
    """Limits of a step over all replicas."""
    each = [_replica_limits(runner.plan, replica) for replica in step.replicas]
    work = np.mean([_rank_work(runner.plan, replica) for replica in step.replicas], axis=0)
    return Limits(
        ideal_ms=float(work.mean()),
        bottleneck_ms=float(work.max()),
        bound_ms=max(own.bound_ms for own in each),
    )


def _replica_limits(plan: StagePlan, step: ReplicaStep) -> Limits:
    splits = any(
        action.kind is ActionKind.W for own in step.simulation.schedule.ranks for action in own
    )
    return step_limits(plan.placement, step.rows, step.costs, splits_gradients=splits)


def _rank_work(plan: StagePlan, step: ReplicaStep) -> list[float]:
    work = step.costs.work_ms()
    return [
        float(sum(work[s] for s in plan.placement.stages_of(rank)))
        for rank in range(plan.placement.num_ranks)
    ]


def _spreads(runner: PolicyRunner, assignment: Assignment) -> tuple[Imbalance, Imbalance]:
    """Forward milliseconds per microbatch of all replicas, in encoder and LLM."""
    parts = _forward_parts(runner.plan)
    encoder_ms, llm_ms = assignment.encoder_cost, assignment.llm_cost
    assert encoder_ms is not None
    assert llm_ms is not None
    replicas = [expand_groups(replica) for replica in assignment.replicas]
    loads = (
        [sum(encoder_ms[i] for i in entry) * parts[0] for r in replicas for entry in r.encoder],
        [sum(llm_ms[i] for i in entry) * parts[1] for r in replicas for entry in r.llm],
    )
    encoder, llm = (imbalance([load for load in own if load > 0]) for own in loads)
    return encoder, llm


def _forward_parts(plan: StagePlan) -> tuple[float, float]:
    """F as a part of F, I and W in each module."""
    part = np.asarray(plan.shares) * plan.phases[:, 0]
    middle = len(plan.encoder_layers)
    return float(part[:middle].sum()), float(part[middle:].sum())


def _forward_times(step: ReplicaStep, plan: StagePlan) -> ForwardTimes:
    middle = len(plan.encoder_layers)
    found = [own.sum(axis=0) for own in np.split(step.costs.forward_ms, [middle])]
    encoder, llm = (tuple(ms for ms in own.tolist() if ms > 0) for own in found)
    return ForwardTimes(encoder_ms=encoder, llm_ms=llm)


def _too_little(
    runner: PolicyRunner, batches: Sequence[GlobalBatch], error: ScheduleError
) -> Exception:
    machine = runner.machine
    if machine.memory_gib is None and machine.max_live is None:
        return error
    return budget_error(machine, max(runner.least_memory(batch) for batch in batches))


def budget_error(machine: Machine, least: float) -> ConfigError:
    """That no schedule fits the memory, and the least that would do.

    Args:
        machine: Holds the budget.
        least: In its unit.
    """
    if machine.memory_gib is not None:
        value, limit = f"memory_gib is {machine.memory_gib:g} per GPU", f"at least {_up(least)}"
    else:
        value = f"max_live is {machine.max_live:g} mean microbatches per rank"
        limit = f"at least {_up(least)}"
    return ConfigError(
        f"{value}, too little for any schedule",
        limit=limit,
        remedy="raise it, use more, smaller microbatches, or training.recompute=true",
    )


def _up(value: float) -> str:
    """Rounded up, so that what is printed does suffice."""
    return f"{np.ceil(value * 100) / 100:.2f}"


def _mean_imbalance(found: Sequence[Imbalance]) -> Imbalance:
    return Imbalance(
        mean=_mean(own.mean for own in found),
        std=_mean(own.std for own in found),
        cv=_mean(own.cv for own in found),
        max_over_mean=_mean(own.max_over_mean for own in found),
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
