"""Plans whose ranks hold several stages: a shared boundary, a V, both modules everywhere."""

from __future__ import annotations

import numpy as np

from lightning_entrain.plan.placements import LayerCut, cut_layers
from lightning_entrain.plan.stages import StageTotals, module_costs, stage_predictions
from lightning_entrain.plan.types import ParallelPlan, StagePrediction
from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.simulate import StepCosts
from lightning_entrain.schedule.types import RowCounts
from lightning_entrain.workload.costs import CostModel
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import ModelShape
from lightning_entrain.workload.tables import SizeTable


def placed_plan(
    placement: str,
    *,
    model: ModelShape,
    table: SizeTable,
    cost_model: CostModel,
    training: Training,
    num_ranks: int,
    dp: int,
    global_batch_size: int,
    num_microbatches: int,
) -> ParallelPlan:
    """Cut the layers for a placement so that the busiest rank has the least to do.

    Args:
        placement: A name in :data:`plan.placements.PLACEMENTS`, but ``one_per_rank``.
        model: The model's layers.
        table: Sizes of the training samples.
        cost_model: Analytic or measured.
        training: What is trained.
        num_ranks: Ranks of one replica.
        dp: Data-parallel replicas.
        global_batch_size: Samples per optimizer step.
        num_microbatches: Microbatches per replica.

    Raises:
        ConfigError: If the model has too few layers.
    """
    size = global_batch_size / dp / num_microbatches
    costs = [
        module_costs(module, table, cost_model, training, tp=1, microbatch_size=size)
        for module in model.modules
    ]
    work = [module.forward_ms + module.backward_ms for module in costs]
    cut = cut_layers(placement, num_ranks, work[0].tolist(), work[1].tolist())
    totals = costs[0].cut(cut.encoder_layers), costs[1].cut(cut.llm_layers)
    times = np.concatenate([part.time_ms for part in totals])
    shares = np.array([part.time_ms.sum() for part in totals]) / max(times.sum(), 1e-30)
    iteration_ms = _iteration_ms(cut, totals, num_microbatches)
    tokens = float(table.num_tokens.mean()) * global_batch_size
    return ParallelPlan(
        dp=dp,
        encoder_layers=cut.encoder_layers,
        llm_layers=cut.llm_layers,
        stage_to_rank=cut.placement.stage_to_rank,
        num_microbatches=num_microbatches,
        global_batch_size=global_batch_size,
        proportions={"encoder": float(shares[0]), "llm": float(shares[1])},
        stages=_predictions(totals, num_microbatches),
        iteration_ms=iteration_ms,
        tokens_per_s=tokens / iteration_ms * 1e3 if iteration_ms else float("nan"),
        limited_by=_limit(cut, times),
        model=model.name,
        cost_model=cost_model.name,
    )


def _predictions(
    totals: tuple[StageTotals, StageTotals], num_microbatches: int
) -> tuple[StagePrediction, ...]:
    """With as many microbatches in flight as plain 1F1B has."""
    state, saved, working = (
        np.concatenate([getattr(part, name) for part in totals])
        for name in ("state_bytes", "saved_bytes", "working_bytes")
    )
    flight = np.minimum(len(state) - np.arange(len(state)), num_microbatches)
    return stage_predictions(totals, state, saved * flight, working, flight)


def _iteration_ms(
    cut: LayerCut, totals: tuple[StageTotals, StageTotals], num_microbatches: int
) -> float:
    """Simulated step of mean microbatches; I and W are halves of the backward."""
    rows = RowCounts.even(num_microbatches)
    forward = np.concatenate([part.forward_ms for part in totals])[:, None]
    backward = np.concatenate([part.backward_ms for part in totals])[:, None] / 2
    table = np.ones((1, num_microbatches))
    costs = StepCosts(
        forward_ms=forward * table, input_ms=backward * table, weight_ms=backward * table
    )
    choice = choose_schedule(cut.placement, rows, costs, num_steps=100)
    return choice.simulation.iteration_ms


def _limit(cut: LayerCut, times: np.ndarray) -> str:
    ranks = cut.placement.stage_to_rank
    loads = [0.0] * cut.placement.num_ranks
    for stage, rank in enumerate(ranks):
        loads[rank] += float(times[stage])
    busiest = loads.index(max(loads))
    return (
        f"rank {busiest} of each replica ({max(loads):.1f} ms per microbatch, "
        f"{max(loads) * len(loads) / (sum(loads) or 1.0):.2f} x the mean rank)"
    )
