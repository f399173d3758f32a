"""Where the layers lie: one module per rank, a shared boundary, a V, or all modules everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.partition import Stages
from lightning_entrain.plan.placements import cut_layers, cut_modules
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.schedule.types import Placement
from lightning_entrain.simulation.costs import Blocks
from lightning_entrain.workload.shapes import FloatArray

Pair = tuple[Blocks, Blocks]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A static layout with its costs.

    Attributes:
        name: How it was cut.
        placement: Which rank of a replica holds which stage.
        encoder_layers: ``(start, stop)`` per encoder stage.
        llm_layers: The same for the LLM.
        shares: Part of its module's work that each stage does.
        phases: Per stage, the parts of its work that are F, I and W, ``[stages, 3]``.
        module_ms: F, I and W of a mean microbatch in encoder and LLM.
        rank_ms: The same on each rank.
        state_gib: Weights, gradients, optimizer states, working space, per rank.
        saved_gib: Kept per mean microbatch in flight, per rank.
        gradient_gib: Gradients to reduce over replicas, per rank.
    """

    name: str
    placement: Placement
    encoder_layers: Stages
    llm_layers: Stages
    shares: tuple[float, ...]
    phases: FloatArray
    module_ms: tuple[float, float]
    rank_ms: tuple[float, ...]
    state_gib: tuple[float, ...]
    saved_gib: tuple[float, ...]
    gradient_gib: tuple[float, ...]

    @property
    def splits(self) -> str:
        """``encoder:llm`` stages."""
        return f"{len(self.encoder_layers)}:{len(self.llm_layers)}"


def stage_plan(
    name: str, placement: Placement, encoder_layers: Stages, llm_layers: Stages, blocks: Pair
) -> StagePlan:
    """Costs of a layout.

    Args:
        name: How it was cut.
        placement: Which rank holds which stage.
        encoder_layers: ``(start, stop)`` per encoder stage.
        llm_layers: The same for the LLM.
        blocks: Costs per layer of encoder and LLM.
    """
    rows, shares = [], []
    num_ranks = placement.num_ranks
    state, saved, gradients, working = np.zeros((4, num_ranks))
    stage = 0
    for module, layers in zip(blocks, (encoder_layers, llm_layers), strict=True):
        whole = float(module.phase_ms.sum()) or 1.0
        for start, stop in layers:
            phases = module.phase_ms[start:stop].sum(axis=0)
            rows.append(phases)
            shares.append(float(phases.sum()) / whole)
            rank = placement.stage_to_rank[stage]
            state[rank] += module.memory.state[start:stop].sum()
            saved[rank] += module.memory.saved[start:stop].sum()
            gradients[rank] += module.memory.gradients[start:stop].sum()
            working[rank] = max(working[rank], module.memory.working[start:stop].max())
            stage += 1
    table = np.array(rows)
    totals = table.sum(axis=1)
    rank_ms = np.zeros(num_ranks)
    np.add.at(rank_ms, list(placement.stage_to_rank), totals)
    even = np.full((1, 3), 1 / 3)
    safe = np.where(totals > 0, totals, 1.0)[:, None]
    return StagePlan(
        name=name,
        placement=placement,
        encoder_layers=encoder_layers,
        llm_layers=llm_layers,
        shares=tuple(shares),
        phases=np.where(totals[:, None] > 0, table / safe, even),
        module_ms=(float(blocks[0].phase_ms.sum()), float(blocks[1].phase_ms.sum())),
        rank_ms=tuple(rank_ms.tolist()),
        state_gib=tuple(((state + working) / 2**30).tolist()),
        saved_gib=tuple((saved / 2**30).tolist()),
        gradient_gib=tuple((gradients / 2**30).tolist()),
    )


def from_parallel_plan(plan: ParallelPlan, blocks: Pair) -> StagePlan:
    """The layout of a plan of the search or of a file.

    Raises:
        ConfigError: If it is for a model with other layers.
    """
    for name, layers, module in zip(
        ("encoder", "llm"), (plan.encoder_layers, plan.llm_layers), blocks, strict=True
    ):
        held = len(module.phase_ms)
        if layers[-1][1] != held:
            raise ConfigError(
                f"plan.{name}_layers ends at layer {layers[-1][1]}",
                limit=f"the model's {name} has {held} layers",
                remedy="plan for the model that is simulated",
            )
    name = "one_per_rank" if plan.stage_to_rank is None else "as planned"
    return stage_plan(name, plan.placement, plan.encoder_layers, plan.llm_layers, blocks)


def split_stages(
    encoder_stages: int, llm_stages: int, blocks: Pair, *, name: str = "one_per_rank"
) -> StagePlan:
    """Each module cut into so many stages with the smallest maximum; one stage per rank.

    Raises:
        ConfigError: If a module has fewer layers than stages.
    """
    layers = _cut(encoder_stages, llm_stages, blocks)
    return stage_plan(name, Placement.one_per_rank(encoder_stages, llm_stages), *layers, blocks)


def least_bottleneck(splits: Sequence[tuple[int, int]], blocks: Pair) -> StagePlan:
    """Of these (encoder stages, LLM stages) that with the lightest busiest rank.

    Raises:
        ConfigError: If there is none.
    """
    fitting = [
        (e, m)
        for e, m in splits
        if 1 <= e <= len(blocks[0].phase_ms) and 1 <= m <= len(blocks[1].phase_ms)
    ]
    if not fitting:
        raise ConfigError(
            f"No split of the ranks into stages among {list(splits)}",
            limit=f"at most {len(blocks[0].phase_ms)} encoder and {len(blocks[1].phase_ms)} LLM "
            "stages, one layer each",
            remedy="use fewer GPUs per replica or more tensor parallelism",
        )
    plans = [split_stages(e, m, blocks) for e, m in fitting]
    return min(plans, key=lambda plan: max(plan.rank_ms))


def placed(name: str, num_ranks: int, blocks: Pair) -> StagePlan:
    """A placement of several stages per rank, with the lightest busiest rank.

    Args:
        name: In :data:`PLACEMENTS`, but ``one_per_rank``.
        num_ranks: Ranks of a replica.
        blocks: Costs per layer of encoder and LLM.

    Raises:
        ConfigError: If the model has too few layers.
    """
    cut = cut_layers(name, num_ranks, blocks[0].total_ms.tolist(), blocks[1].total_ms.tolist())
    return stage_plan(name, cut.placement, cut.encoder_layers, cut.llm_layers, blocks)


def _cut(encoder_stages: int, llm_stages: int, blocks: Pair) -> tuple[Stages, Stages]:
    work = [module.total_ms.tolist() for module in blocks]
    return cut_modules(encoder_stages, llm_stages, work[0], work[1])
