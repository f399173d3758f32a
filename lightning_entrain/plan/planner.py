"""From a request to a plan with its profile of the workload, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_entrain.plan.batch_size import (
    Allocation,
    BMin,
    allocation_trials,
    find_b_min,
    split_names,
)
from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.search import Evaluate, SearchResult, search_plans
from lightning_entrain.plan.types import ParallelPlan, Supported
from lightning_entrain.workload.costs import CostModel, sample_costs
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import FloatArray, ModelShape
from lightning_entrain.workload.tables import SizeTable


@dataclass(frozen=True, kw_only=True)
class BMinOptions:
    """Options of Algorithm 1 and of the table of splits.

    Attributes:
        alpha: Chance of calling an unstable batch size stable.
        p_error: Rate of other allocations that counts as unstable.
        max_batch: Largest batch size tried.
        seed: Seed of the drawn batches.
        batch_sizes: Batch sizes of the table.
        trials: Batches per size of the table; None for Algorithm 1's 59.
    """

    alpha: float = 0.05
    p_error: float = 0.05
    max_batch: int = 8192
    seed: int = 0
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 256)
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """What a dataset asks of a split (Entrain, section 4.2).

    Attributes:
        b_min: Result of Algorithm 1.
        trials: Allocations seen per batch size, with their counts.
    """

    b_min: BMin
    trials: dict[int, dict[Allocation, int]]

    @property
    def proportions(self) -> dict[str, float]:
        """Share of the work per module over the whole data."""
        return dict(zip(("encoder", "llm"), self.b_min.proportions, strict=True))

    @property
    def split_names(self) -> dict[int, tuple[str, ...]]:
        """Splits ``"encoder:llm"`` seen per batch size."""
        return split_names(self.trials)


def profile_workload(
    model: ModelShape,
    table: SizeTable,
    cost_model: CostModel,
    num_gpus: int,
    *,
    training: Training | None = None,
    encoder_tp: int = 1,
    llm_tp: int = 1,
    options: BMinOptions | None = None,
) -> WorkloadProfile:
    """b_min, shares and splits of a dataset for one replica of ``num_gpus``.

    Args:
        model: Shape of the model.
        table: Sizes of the dataset's samples.
        cost_model: Analytic or measured.
        num_gpus: GPUs of one replica.
        training: What is trained; None trains all.
        encoder_tp: Tensor parallelism of the encoder, which changes its efficiency.
        llm_tp: The same for the LLM.
        options: Options of Algorithm 1.
    """
    options = options or BMinOptions()
    work = gpu_work(
        model, table, cost_model, training or Training(), encoder_tp=encoder_tp, llm_tp=llm_tp
    )
    found = find_b_min(
        work,
        num_gpus,
        alpha=options.alpha,
        p_error=options.p_error,
        seed=options.seed,
        max_batch=options.max_batch,
    )
    trials = allocation_trials(
        work, num_gpus, options.batch_sizes, trials=options.trials, seed=options.seed
    )
    return WorkloadProfile(b_min=found, trials=trials)


def gpu_work(
    model: ModelShape,
    table: SizeTable,
    cost_model: CostModel,
    training: Training,
    *,
    encoder_tp: int = 1,
    llm_tp: int = 1,
) -> FloatArray:
    """GPU-milliseconds per sample in encoder and LLM, ``[num_samples, 2]``; see above."""
    costs = sample_costs(model, table, cost_model, training, encoder_tp=encoder_tp, llm_tp=llm_tp)
    return np.stack([costs.encoder_ms * encoder_tp, costs.llm_ms * llm_tp], axis=1)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A choice of plan and all that led to it.

    Attributes:
        result: Plans, best first; each carries b_min, trials and proportions.
        profile: b_min and splits of the data.
        request: What was planned for.
        warnings: Sentences for the user.
    """

    result: SearchResult
    profile: WorkloadProfile
    request: PlanRequest
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> ParallelPlan:
        """The chosen plan."""
        return self.result.best


def make_plan(
    request: PlanRequest,
    *,
    supported: Supported | None = None,
    runnable_only: bool = False,
    evaluate: Evaluate | None = None,
    num_best: int = 6,
    options: BMinOptions | None = None,
    names: Mapping[str, str] | None = None,
) -> PlanReport:
    """Search for plans, then profile the data for the GPUs of the best one's replica.

    Args:
        request: What to plan for.
        supported: What the runtime can do; see :func:`search_plans`.
        runnable_only: Leave out what it cannot do.
        evaluate: Predicts the step time of the best few plans, e.g. by simulation.
        num_best: Plans to return.
        options: Options of Algorithm 1.
        names: Names of ``data`` and ``cluster`` for the plan.

    Raises:
        ConfigError: If an argument is out of range.
        InfeasiblePlanError: If nothing fits.
    """
    names = names or {}
    result = search_plans(
        request,
        supported=supported,
        runnable_only=runnable_only,
        evaluate=evaluate,
        num_best=num_best,
    )
    best = result.best
    profile = profile_workload(
        request.model,
        request.table,
        request.cost_model,
        best.gpus_per_replica,
        training=request.training,
        encoder_tp=best.encoder_tp,
        llm_tp=best.llm_tp,
        options=options,
    )
    plans = tuple(
        replace(
            plan,
            b_min=profile.b_min.b_min,
            proportions=profile.proportions,
            trials=profile.split_names,
            data=names.get("data", ""),
            cluster=names.get("cluster") or plan.cluster,
        )
        for plan in result.plans
    )
    return PlanReport(
        result=replace(result, plans=plans),
        profile=profile,
        request=request,
        warnings=_warnings(request, profile.b_min),
    )


def _warnings(request: PlanRequest, found: BMin) -> tuple[str, ...]:
    warnings = []
    if len(request.table) < request.global_batch_size:
        warnings.append(
            f"The table holds {len(request.table)} samples, fewer than a global batch of "
            f"{request.global_batch_size}: entrain-train would refuse data of that size"
        )
    if request.global_batch_size < found.b_min:
        warnings.append(
            f"The global batch of {request.global_batch_size} samples is smaller than b_min "
            f"{found.b_min}: single steps may need another split than the plan's"
        )
    if not found.stable:
        first, second = found.competitors[:2]
        names = [":".join(map(str, item.allocation)) for item in (first, second)]
        apart = abs(first.relative_time / second.relative_time - 1)
        warnings.append(
            f"The share lies on a rounding boundary: batches of {found.b_min} samples ask for "
            f"{names[0]} or {names[1]} GPUs, whose step times differ by {100 * apart:.1f} %"
        )
    return tuple(warnings)
