"""Simulated step time as the objective of the plan search."""

from __future__ import annotations

import statistics

import numpy as np

from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.search import Evaluate
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.simulation.costs import Costing
from lightning_entrain.simulation.inputs import Machine, PolicyOptions, batches
from lightning_entrain.simulation.links import plan_link
from lightning_entrain.simulation.policies import PolicyRunner
from lightning_entrain.simulation.stage_plan import StagePlan, from_parallel_plan
from lightning_entrain.workload.hardware import Cluster

JOINT = PolicyOptions(schedule="auto", limit_by_heaviest=False, num_steps=300, template_steps=0)


def plan_evaluator(
    request: PlanRequest,
    *,
    policy: str = "joint",
    options: PolicyOptions = JOINT,
    num_batches: int = 2,
    seed: int = 0,
) -> Evaluate:
    """``evaluate`` for ``search_plans``: real samples, assigned and scheduled as in training.

    The time is that of the slowest replica, transfers between stages included, plus the reduction
    of gradients over replicas. Each plan sees the same global batches.

    Args:
        request: What is planned for.
        policy: Assignment policy.
        options: How it is run. The memory of a schedule is not capped: the search has checked it.
        num_batches: Global batches to simulate per plan.
        seed: Of the batches and the searches.
    """

    def evaluate(plan: ParallelPlan) -> float:
        costing = Costing(
            kind="model",
            model=request.model,
            device=request.cluster.device,
            cost_model=request.cost_model,
            training=request.training,
            encoder_tp=plan.encoder_tp,
            llm_tp=plan.llm_tp,
            microbatch_size=plan.microbatch_size,
        )
        encoder_ms, llm_ms = costing.sample_ms(request.table)
        layout = from_parallel_plan(plan, costing.blocks(request.table))
        machine = Machine(
            num_replicas=plan.dp,
            num_microbatches=plan.num_microbatches,
            link=plan_link(layout, request.model, request.cluster, request.training),
            seed=seed,
        )
        runner = PolicyRunner(policy=policy, options=options, plan=layout, machine=machine)
        drawn = batches(
            request.table,
            encoder_ms,
            llm_ms,
            batch_size=plan.global_batch_size,
            num_batches=num_batches,
            seed=seed,
        )
        times = [runner.run(batch).iteration_ms for batch in drawn]
        return statistics.fmean(times) + reduce_ms(layout, plan.dp, request.cluster)

    return evaluate


def reduce_ms(plan: StagePlan, num_replicas: int, cluster: Cluster) -> float:
    """Ring all-reduce of the largest rank's gradients over the replicas."""
    if num_replicas == 1:
        return 0.0
    share = 2 * (num_replicas - 1) / num_replicas
    largest = float(np.max(plan.gradient_gib)) * 2**30
    return share * largest / (cluster.network_gbps * 1e6)
