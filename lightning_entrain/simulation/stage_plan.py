"""Where the layers lie: one module per rank, a shared boundary, a V, or all modules everywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.partition import Stages, partition_layers
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.schedule.types import Placement
from lightning_entrain.simulation.costs import Blocks
from lightning_entrain.workload.shapes import FloatArray

PLACEMENTS = ("one_per_rank", "shared_boundary", "v_shaped")
"""``one_per_rank``: every rank holds layers of one module. ``shared_boundary``: one rank may hold
the encoder's last and the LLM's first. ``v_shaped``: two chunks per rank, down and back up."""

Pair = tuple[Blocks, Blocks]
_NUM_MOVES = 3000


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
    placement = Placement.one_per_rank(plan.encoder_stages, plan.llm_stages)
    return stage_plan("one_per_rank", placement, plan.encoder_layers, plan.llm_layers, blocks)


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


def colocated(num_ranks: int, blocks: Pair) -> StagePlan:
    """Both modules spread over all ranks, as DIP does."""
    encoder, llm = (min(num_ranks, len(module.phase_ms)) for module in blocks)
    placement = Placement.colocated(encoder, llm, num_ranks)
    return stage_plan("colocated", placement, *_cut(encoder, llm, blocks), blocks)


def shared_boundary(num_ranks: int, blocks: Pair) -> StagePlan:
    """All layers in a row, cut into ranks; one of them may hold layers of both modules."""
    row = np.concatenate([module.total_ms for module in blocks])
    middle = len(blocks[0].phase_ms)
    ranges = partition_layers(row, num_ranks)
    encoder = [(a, min(b, middle), r) for r, (a, b) in enumerate(ranges) if a < middle]
    llm = [
        (max(a, middle) - middle, b - middle, r) for r, (a, b) in enumerate(ranges) if b > middle
    ]
    placement = Placement(
        num_encoder_stages=len(encoder),
        num_llm_stages=len(llm),
        stage_to_rank=tuple(rank for _, _, rank in encoder + llm),
    )
    layers = [tuple((a, b) for a, b, _ in own) for own in (encoder, llm)]
    return stage_plan("shared_boundary", placement, layers[0], layers[1], blocks)


def v_shaped(num_ranks: int, blocks: Pair) -> StagePlan:
    """Two chunks per rank, rank 0 with the first and the last: cuts with the lightest busiest rank.

    Raises:
        ConfigError: If the model has fewer layers than chunks.
    """
    plans = []
    for encoder in range(1, 2 * num_ranks):
        llm = 2 * num_ranks - encoder
        even = 0.5 <= encoder / llm * _ratio(blocks) <= 2
        if even and encoder <= len(blocks[0].phase_ms) and llm <= len(blocks[1].phase_ms):
            plans.append(_balanced_v(encoder, llm, blocks))
    if not plans:
        raise ConfigError(
            f"strategy.placement is v_shaped with {num_ranks} ranks",
            limit=f"two chunks of whole layers per rank, {2 * num_ranks} in all",
            remedy="use fewer ranks or placement=shared_boundary",
        )
    return min(plans, key=lambda plan: max(plan.rank_ms))


def _ratio(blocks: Pair) -> float:
    """LLM's work over the encoder's: chunk counts far from it are not worth a look."""
    encoder, llm = (float(module.phase_ms.sum()) for module in blocks)
    return llm / encoder if encoder else 1.0


def _balanced_v(encoder: int, llm: int, blocks: Pair) -> StagePlan:
    """Move cuts, up to three at a time, while the ranks even out."""
    placement = Placement.v_shaped(encoder, llm)
    sums = [np.concatenate([[0.0], np.cumsum(m.total_ms)]).tolist() for m in blocks]
    cuts = [[stop for _, stop in layers][:-1] for layers in _cut(encoder, llm, blocks)]
    ranks = placement.stage_to_rank

    def score(found: list[list[int]]) -> float:
        loads = [0.0] * placement.num_ranks
        squares, stage = 0.0, 0
        for cut, total in zip(found, sums, strict=True):
            for a, b in itertools.pairwise([0, *cut, len(total) - 1]):
                if a >= b or b >= len(total):
                    return float("inf")
                chunk = total[b] - total[a]
                loads[ranks[stage]] += chunk
                squares += chunk * chunk
                stage += 1
        # Even ranks first; even chunks keep the schedule from stumbling.
        return max(loads) + 0.1 * squares / sum(loads)

    best = score(cuts)
    rng = random.Random(0)
    for _ in range(_NUM_MOVES):
        moved = [list(cut) for cut in cuts]
        for _ in range(rng.randint(1, 3)):
            cut = moved[rng.randrange(2)]
            if cut:
                cut[rng.randrange(len(cut))] += rng.choice((-1, 1))
        found = score(moved)
        if found <= best:
            best, cuts = found, moved
    layers = [
        tuple(itertools.pairwise([0, *cut, len(total) - 1]))
        for cut, total in zip(cuts, sums, strict=True)
    ]
    return stage_plan("v_shaped", placement, layers[0], layers[1], blocks)


def _cut(encoder_stages: int, llm_stages: int, blocks: Pair) -> tuple[Stages, Stages]:
    found = []
    for name, num, module in zip(
        ("encoder", "LLM"), (encoder_stages, llm_stages), blocks, strict=True
    ):
        if not 1 <= num <= len(module.phase_ms):
            raise ConfigError(
                f"{num} {name} stages",
                limit=f"1 to {len(module.phase_ms)}, one layer per stage",
            )
        found.append(partition_layers(module.total_ms, num))
    return found[0], found[1]
