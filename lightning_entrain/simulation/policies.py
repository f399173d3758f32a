"""From a global batch to every replica's simulated step, by the functions that training calls."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.types import Assignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.choose import FAMILIES, choose_schedule
from lightning_entrain.schedule.dip import build_dip, expand_groups
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import Link, Simulation, StepCosts, simulate
from lightning_entrain.schedule.template import Template
from lightning_entrain.schedule.types import RowCounts, Schedule
from lightning_entrain.simulation.inputs import GlobalBatch, Machine, PolicyOptions
from lightning_entrain.simulation.stage_plan import StagePlan
from lightning_entrain.simulation.templates import plan_template


@dataclass(frozen=True, kw_only=True)
class ReplicaStep:
    """One replica's step.

    Attributes:
        simulation: Its run.
        rows: Rows by position in the schedule.
        costs: Costs by position in the schedule.
        name: Of the schedule.
    """

    simulation: Simulation
    rows: RowCounts
    costs: StepCosts
    name: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """All replicas' step of one global batch under one policy.

    Attributes:
        assignment: Which sample is where.
        replicas: Per replica what it does.
        planning_ms: Assignment, and the schedule of the replica that takes longest; ranks plan
            their own replica alone.
    """

    assignment: Assignment
    replicas: tuple[ReplicaStep, ...]
    planning_ms: float

    @property
    def iteration_ms(self) -> float:
        """Of the slowest replica."""
        return max(step.simulation.iteration_ms for step in self.replicas)

    @property
    def slowest(self) -> int:
        """Which replica that is."""
        times = [step.simulation.iteration_ms for step in self.replicas]
        return times.index(max(times))


@dataclass
class PolicyRunner:
    """Runs one policy on one plan.

    Attributes:
        policy: Name of the assignment policy.
        options: How it is run.
        plan: The layout.
        machine: Replicas, memory, links.
    """

    policy: str
    options: PolicyOptions
    plan: StagePlan
    machine: Machine
    _templates: dict[tuple[int, bool], Template | None] = field(default_factory=dict)

    def run(self, batch: GlobalBatch) -> Step:
        """Assign, schedule and simulate one global batch; the fastest of the candidates.

        Raises:
            ScheduleError: If no candidate fits the memory.
        """
        best: Step | None = None
        refused: ScheduleError | None = None
        spent = 0.0
        for count, template in self._candidates(batch):
            try:
                step = self._step(batch, count, template)
            except ScheduleError as error:
                refused = error
                continue
            spent += step.planning_ms
            if best is None or step.iteration_ms < best.iteration_ms:
                best = step
        if best is None:
            assert refused is not None
            raise refused
        return replace(best, planning_ms=spent)

    def least_memory(self, batch: GlobalBatch) -> float:
        """Least of ``max_live`` or ``memory_gib``, whichever caps, that fits this batch."""
        found = []
        for count, template in self._candidates(batch):
            assignment = self._assign(batch, count, template)
            needs = []
            for replica in range(len(assignment.replicas)):
                rows, costs = self._costs(assignment, replica, batch)
                peaks = self._smallest(rows, costs).peak_bytes
                needs.append(max(self._amount(peaks, rows.num_microbatches)))
            found.append(max(needs))
        return min(found)

    def rank_gib(self, step: ReplicaStep) -> tuple[float, ...]:
        """Peak memory of each rank: states and activations."""
        peaks = step.simulation.peak_bytes
        scale = self.machine.num_microbatches / max(step.rows.num_microbatches, 1)
        return tuple(
            state + saved * peak * scale
            for state, saved, peak in zip(
                self.plan.state_gib, self.plan.saved_gib, peaks, strict=True
            )
        )

    def _candidates(self, batch: GlobalBatch) -> Iterator[tuple[int, Template | None]]:
        for count in self.options.counts(self.machine.num_microbatches):
            yield count, self._template(batch, count, ramp=False)
            if self.options.ramp:
                template = self._template(batch, count, ramp=True)
                if template is not None:
                    yield count, template

    def _template(self, batch: GlobalBatch, count: int, *, ramp: bool) -> Template | None:
        """The order of the plan: found once, at the first batch."""
        if self.options.schedule != "auto":
            return None
        if (count, ramp) not in self._templates:
            try:
                caps = self._caps(count)
            except ScheduleError:  # which the step's own search says better
                return None
            self._templates[count, ramp] = plan_template(
                self.plan,
                self.machine,
                batch,
                num_microbatches=count,
                caps=caps,
                ramp=ramp,
                num_steps=self.options.template_steps,
            )
        return self._templates[count, ramp]

    @property
    def _live(self) -> float:
        given = self.machine.max_live
        return self.plan.placement.num_ranks + 1.0 if given is None else given

    def _assign(self, batch: GlobalBatch, count: int, template: Template | None) -> Assignment:
        extra: dict[str, Any] = {}
        if self.policy == "disttrain":
            extra["num_stages"] = self.plan.placement.num_ranks
        if self.policy == "dip":
            extra["num_groups"] = self.options.num_groups
        if template is not None and template.is_ramp:
            extra["ramp"] = template.profile
        return assign_samples(
            batch.encoder_ms,
            batch.llm_ms,
            num_replicas=self.machine.num_replicas,
            num_microbatches=count,
            policy=self.policy,
            seed=self.machine.seed,
            max_lag=self.options.max_lag,
            limit_by_heaviest=self.options.limit_by_heaviest,
            equal_counts=len(batch.table) % self.machine.num_replicas == 0,
            **extra,
        )

    def _step(self, batch: GlobalBatch, count: int, template: Template | None) -> Step:
        begin = time.perf_counter()
        assignment = self._assign(batch, count, template)
        assign_ms = (time.perf_counter() - begin) * 1e3
        steps, longest = [], 0.0
        for replica in range(len(assignment.replicas)):
            begin = time.perf_counter()
            rows, costs = self._costs(assignment, replica, batch)
            steps.append(self._schedule(rows, costs, template))
            longest = max(longest, (time.perf_counter() - begin) * 1e3)
        return Step(assignment=assignment, replicas=tuple(steps), planning_ms=assign_ms + longest)

    def _costs(
        self, assignment: Assignment, replica: int, batch: GlobalBatch
    ) -> tuple[RowCounts, StepCosts]:
        own = assignment
        if assignment.replicas[replica].groups is not None:
            expanded = [expand_groups(r) for r in assignment.replicas]
            own = replace(assignment, replicas=tuple(expanded))
        placement = self.plan.placement
        rows, costs = replica_step(
            own,
            replica,
            placement,
            self.plan.shares,
            sizes=batch.sizes if self.machine.link is not None else None,
        )
        forward, backward_input, weight = (self.plan.phases[:, [p]] for p in range(3))
        total = costs.forward_ms
        mean = float((total * forward).mean()) if total.size else 0.0
        return rows, replace(
            costs,
            forward_ms=total * forward,
            input_ms=total * backward_input,
            weight_ms=total * weight,
            overhead_ms=self.machine.overhead * mean,
        )

    def _schedule(
        self, rows: RowCounts, costs: StepCosts, template: Template | None
    ) -> ReplicaStep:
        placement, link = self.plan.placement, self.machine.link
        if self.options.schedule in ("1f1b", "dip"):
            build = build_1f1b if self.options.schedule == "1f1b" else build_dip
            return _replica_step(build(placement, rows), rows, costs, link)
        fits = template is not None and template.fits(placement, rows)
        try:
            choice = choose_schedule(
                placement,
                rows,
                costs,
                max_bytes=self._caps(rows.num_microbatches),
                link=link,
                families=("1f1b",) if self.options.schedule == "eager" else FAMILIES,
                profile=template.profile if template and template.is_ramp and fits else None,
                template=template,
                num_steps=self.options.num_steps,
                seed=self.machine.seed,
            )
        except ScheduleError:
            asked = self.machine.max_live is not None or self.machine.memory_gib is not None
            if asked and self.options.schedule == "auto":
                raise
            # Nobody asked for this cap, or the policy has no other schedule: then as it is.
            plain = build_1f1b(placement, rows, split_backward=rows.max_lag > 0)
            return _replica_step(plain, rows, costs, link)
        tuned = choice.tuned
        return ReplicaStep(
            simulation=choice.simulation,
            rows=tuned.reorder_rows(rows),
            costs=tuned.reorder_costs(costs),
            name=choice.name,
        )

    def _caps(self, num_microbatches: int) -> tuple[float, ...]:
        """Most activations per rank, in mean microbatches of this replica."""
        caps = [self._live] * self.plan.placement.num_ranks
        if self.machine.memory_gib is not None:
            scale = num_microbatches / self.machine.num_microbatches
            room = [
                (self.machine.memory_gib - state) / saved * scale if saved else math.inf
                for state, saved in zip(self.plan.state_gib, self.plan.saved_gib, strict=True)
            ]
            if self.machine.max_live is None:
                caps = room
            caps = [min(cap, own) for cap, own in zip(caps, room, strict=True)]
        if min(caps) <= 0:
            raise ScheduleError(
                f"memory_gib is {self.machine.memory_gib}",
                limit="more than weights, gradients and optimizer states take",
            )
        return tuple(caps)

    def _smallest(self, rows: RowCounts, costs: StepCosts) -> Simulation:
        """The run that begins a microbatch only when it has to."""
        placement = self.plan.placement
        caps = [1 + rows.max_lag] * placement.num_encoder_stages + [1] * placement.num_llm_stages
        schedule = build_1f1b(placement, rows, split_backward=rows.max_lag > 0, caps=caps)
        return simulate(schedule, costs, rows, link=self.machine.link)

    def _amount(self, peaks: Sequence[float], num_microbatches: int) -> list[float]:
        """Peaks in the unit of the cap."""
        if self.machine.memory_gib is None:
            return list(peaks)
        scale = self.machine.num_microbatches / max(num_microbatches, 1)
        return [
            state + saved * peak * scale
            for state, saved, peak in zip(
                self.plan.state_gib, self.plan.saved_gib, peaks, strict=True
            )
        ]


def _replica_step(
    schedule: Schedule, rows: RowCounts, costs: StepCosts, link: Link | None
) -> ReplicaStep:
    found = simulate(schedule, costs, rows, link=link)
    return ReplicaStep(simulation=found, rows=rows, costs=costs, name=schedule.name)
