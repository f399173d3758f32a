"""From a request to layouts, batches and runners: what a comparison of policies is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.placements import PLACEMENTS
from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.search import search_plans
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.simulation.costs import Blocks, Costing
from lightning_entrain.simulation.inputs import (
    GlobalBatch,
    Machine,
    PolicyOptions,
    batches,
    parse_splits,
)
from lightning_entrain.simulation.links import plan_link
from lightning_entrain.simulation.policies import PolicyRunner
from lightning_entrain.simulation.results import PolicyResult, budget_error, run_policy
from lightning_entrain.simulation.stage_plan import (
    StagePlan,
    from_parallel_plan,
    least_bottleneck,
    placed,
    split_stages,
)
from lightning_entrain.workload.hardware import Cluster

STAGE_CHOICES = ("bottleneck", "search")
"""How stages are found without a plan: the split with the lightest busiest rank, or that of
`entrain-plan`, which also counts fill, drain and memory."""


@dataclass(frozen=True, kw_only=True)
class SimulationSetting:
    """All options of a comparison; see `docs/simulation.md`.

    Attributes:
        request: Model, samples, cluster, cost model, training, what is given of the plan.
        plan: A plan, or None to search.
        placement: One of :data:`plan.placements.PLACEMENTS`.
        stage_choice: One of :data:`STAGE_CHOICES`.
        costs: One of :data:`costs.COST_KINDS`.
        communication: Whether transfers take time.
        latency_us: Of one message.
        overhead: Added to every action, as a part of the mean F.
        max_live: Memory per rank in mean microbatches.
        memory_gib: Memory per rank.
        num_batches: Global batches to simulate.
        seed: Of the batches and the searches.
    """

    request: PlanRequest
    plan: ParallelPlan | None = None
    placement: str = "one_per_rank"
    stage_choice: str = "bottleneck"
    costs: str = "flops"
    communication: bool = False
    latency_us: float = 10.0
    overhead: float = 0.0
    max_live: float | None = None
    memory_gib: float | None = None
    num_batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("strategy.placement", self.placement, PLACEMENTS)
        _one_of("strategy.stage_choice", self.stage_choice, STAGE_CHOICES)
        if self.num_batches < 1:
            raise ConfigError(f"num_batches is {self.num_batches}", limit="at least 1")
        for name in ("overhead", "latency_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}", limit="at least 0")
        for name in ("max_live", "memory_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}", limit="above 0")
        if self.plan is not None:
            _check_fits(self.plan, self.request.cluster)

    @cached_property
    def parallel_plan(self) -> ParallelPlan:
        """The given plan, or the search's best: replicas, tensor parallelism and K are its."""
        if self.plan is not None:
            return self.plan
        return search_plans(self.request, num_best=1).best

    @cached_property
    def costing(self) -> Costing:
        """What predicts time."""
        plan = self.parallel_plan
        return Costing(
            kind=self.costs,
            model=self.request.model,
            device=self.request.cluster.device,
            cost_model=self.request.cost_model,
            training=self.request.training,
            encoder_tp=plan.encoder_tp,
            llm_tp=plan.llm_tp,
            microbatch_size=plan.microbatch_size,
        )

    @cached_property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """Costs per layer."""
        return self.costing.blocks(self.request.table)

    @cached_property
    def stages(self) -> StagePlan:
        """The layout of policies that do not ask for another."""
        plan = self.parallel_plan
        if self.placement != "one_per_rank":
            if plan.encoder_tp != plan.llm_tp:
                raise ConfigError(
                    f"strategy.placement is {self.placement} with encoder_tp {plan.encoder_tp} "
                    f"and llm_tp {plan.llm_tp}",
                    limit="equal tensor parallelism, for a rank holds layers of both modules",
                )
            return placed(self.placement, self._num_ranks, self.blocks)
        if self.plan is not None or self.stage_choice == "search":
            return from_parallel_plan(plan, self.blocks)
        return least_bottleneck(self._splits(), self.blocks)

    @cached_property
    def drawn(self) -> list[GlobalBatch]:
        """The global batches."""
        encoder_ms, llm_ms = self.costing.sample_ms(self.request.table)
        return batches(
            self.request.table,
            encoder_ms,
            llm_ms,
            batch_size=self.parallel_plan.global_batch_size,
            num_batches=self.num_batches,
            seed=self.seed,
        )

    @property
    def _num_ranks(self) -> int:
        return self.parallel_plan.placement.num_ranks

    def _splits(self) -> list[tuple[int, int]]:
        """Stage counts that use all GPUs of a replica and what is given of the plan."""
        plan, request = self.parallel_plan, self.request
        found = []
        for encoder in range(1, plan.gpus_per_replica // plan.encoder_tp + 1):
            llm, odd = divmod(plan.gpus_per_replica - encoder * plan.encoder_tp, plan.llm_tp)
            given = request.encoder_stages in (None, encoder) and request.llm_stages in (None, llm)
            if llm >= 1 and not odd and given:
                found.append((encoder, llm))
        return found

    def runner(self, policy: str, options: PolicyOptions) -> PolicyRunner:
        """One policy, ready to run.

        Raises:
            ConfigError: If an option cannot be used.
        """
        options.check(policy)
        layout = self._layout(options)
        plan = self.parallel_plan
        link = None
        if self.communication:
            request = self.request
            link = plan_link(
                layout,
                request.model,
                request.cluster,
                request.training,
                latency_us=self.latency_us,
            )
        machine = Machine(
            num_replicas=plan.dp,
            num_microbatches=plan.num_microbatches,
            link=link,
            overhead=self.overhead,
            max_live=self.max_live,
            memory_gib=self.memory_gib,
            seed=self.seed,
        )
        return PolicyRunner(policy=policy, options=options, plan=layout, machine=machine)

    def _layout(self, options: PolicyOptions) -> StagePlan:
        if options.schedule == "dip":
            return placed("colocated", self._num_ranks, self.blocks)
        if options.stages is None:
            return self.stages
        encoder, llm = parse_splits(options.stages)
        plan = self.parallel_plan
        gpus = encoder * plan.encoder_tp + llm * plan.llm_tp
        if gpus != plan.gpus_per_replica:
            raise ConfigError(
                f"stages is {options.stages!r}, {gpus} GPUs per replica",
                limit=f"the replica's {plan.gpus_per_replica} GPUs",
            )
        return split_stages(encoder, llm, self.blocks)

    def describe(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The ``setting`` of `simulation.json`.

        Args:
            options: Of each policy, as plain values.
        """
        plan, request = self.parallel_plan, self.request
        return {
            "model": request.model.name,
            "data": plan.data,
            "num_samples": len(request.table),
            "cluster": f"{request.cluster.num_gpus} x {request.cluster.device.name}",
            "replicas": plan.dp,
            "encoder_tp": plan.encoder_tp,
            "llm_tp": plan.llm_tp,
            "global_batch_size": plan.global_batch_size,
            "num_microbatches": plan.num_microbatches,
            "num_batches": self.num_batches,
            "seed": self.seed,
            "costs": self.costing.name,
            "placement": self.placement,
            "communication": self.communication,
            "overhead": self.overhead,
            "max_live": self.max_live,
            "memory_gib": self.memory_gib,
            "time_unit": "ms",
            "policies": dict(options),
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several policies on the same global batches.

    Attributes:
        setting: What was asked.
        names: Names of the policies, as the user wrote them.
        results: One for each.
        baseline: Index of the one that others are compared with.
        described: The setting as plain values.
    """

    setting: SimulationSetting
    names: tuple[str, ...]
    results: tuple[PolicyResult, ...]
    baseline: int = 0
    described: Mapping[str, Any] = field(default_factory=dict)

    def speedup(self, index: int) -> float:
        """Throughput of a policy over the baseline's."""
        own = self.results[index].iteration_ms
        return self.results[self.baseline].iteration_ms / own if own else 1.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the user."""
        setting, device = self.setting, self.setting.request.cluster.device
        gib, live = setting.memory_gib, setting.max_live
        usable = setting.request.cluster.usable_bytes / 2**30 if gib is None else gib
        what = (
            f"{math.floor(100 * usable) / 100:.2f} GiB that a device ({device.name}) has to use"
            if gib is None
            else (f"{gib:g} GiB of memory_gib")
        )
        found = []
        samples, batch = len(setting.request.table), setting.parallel_plan.global_batch_size
        if samples < batch:
            found.append(
                f"The table holds {samples} samples, fewer than a global batch of {batch}: every "
                "batch holds some of them more than once"
            )
        if text := self._above([max(result.peak_gib) for result in self.results], usable):
            obey = "" if gib else f"memory_gib={math.floor(100 * usable) / 100:.2f}, which chosen "
            obey += "" if gib else "schedules keep to (policy_options.NAME.schedule=auto); "
            found.append(
                f"More than the {what}: {text}. Remedy: {obey}more, smaller microbatches "
                "(policy_options.NAME.num_microbatches); training.recompute=true; more devices"
            )
        if live is not None:
            text = self._above([result.peak_mean for result in self.results], live)
            if text:
                found.append(f"More than the {live:g} mean microbatches of max_live: {text}")
        return tuple(found)

    def _above(self, amounts: Sequence[float], limit: float) -> str:
        pairs = zip(self.names, amounts, strict=True)
        # Rounded up, so that what is printed is more than the limit.
        return ", ".join(
            f"{name} {math.ceil(100 * own) / 100:.2f}"
            for name, own in pairs
            if own > limit * (1 + 1e-6)
        )

    def to_json(self) -> dict[str, Any]:
        """The record of `simulation.json`."""
        results = [
            {**result.to_json(), "policy": name}
            for name, result in zip(self.names, self.results, strict=True)
        ]
        return {"setting": dict(self.described), "results": results}


def compare(
    setting: SimulationSetting,
    policies: Sequence[tuple[str, str, PolicyOptions]],
    *,
    baseline: str | None = None,
    described: Mapping[str, Any] | None = None,
    data: str = "",
) -> Comparison:
    """Simulate several policies.

    Args:
        setting: What they have in common.
        policies: Name, assignment policy and options of each.
        baseline: Name of the one to compare with; None for the first.
        described: Options of each policy, as plain values.
        data: Name of the data.

    Raises:
        ConfigError: If an option cannot be used or no schedule fits the memory.
    """
    names = tuple(name for name, _, _ in policies)
    if not names:
        raise ConfigError("policies is empty", limit="at least one")
    if len(set(names)) < len(names):
        raise ConfigError(f"policies is {list(names)}", limit="each once")
    if baseline is not None and baseline not in names:
        raise ConfigError(f"baseline is {baseline!r}", limit=f"one of {', '.join(names)}")
    runners = [setting.runner(policy, options) for _, policy, options in policies]
    results = tuple(run_policy(runner, setting.drawn) for runner in runners)
    _check_budget(runners[0].machine, results)
    record = setting.describe(described or {})
    return Comparison(
        setting=setting,
        names=names,
        results=results,
        baseline=names.index(baseline) if baseline else 0,
        described={**record, "data": data or record["data"]},
    )


def _check_budget(machine: Machine, results: Sequence[PolicyResult]) -> None:
    """At least one policy fits the memory that was asked for."""
    needs = None
    if machine.memory_gib is not None:
        needs = min(max(result.peak_gib) for result in results), machine.memory_gib
    elif machine.max_live is not None:
        needs = min(result.peak_mean for result in results), machine.max_live
    if needs is not None and needs[0] > needs[1] * (1 + 1e-6):
        raise budget_error(machine, needs[0])


def _check_fits(plan: ParallelPlan, cluster: Cluster) -> None:
    if plan.num_gpus != cluster.num_gpus:
        raise ConfigError(
            f"The plan is for {plan.num_gpus} GPUs ({plan.dp} replicas x {plan.gpus_per_replica})",
            limit=f"the cluster has {cluster.num_gpus}",
            remedy=f"set cluster.num_gpus={plan.num_gpus}, or plan for this cluster",
        )
    tp = max(plan.encoder_tp, plan.llm_tp)
    if tp > cluster.gpus_per_node:
        raise ConfigError(
            f"The plan has tensor parallelism {tp}",
            limit=f"at most the {cluster.gpus_per_node} GPUs of a node",
        )


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}", limit=f"one of {', '.join(known)}")
