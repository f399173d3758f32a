"""Where layers lie on the ranks of a replica: cuts with the lightest busiest rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.partition import Stages, partition_layers
from lightning_entrain.schedule.types import Placement

_NUM_MOVES = 3000


@dataclass(frozen=True, kw_only=True)
class LayerCut:
    """Layers in stages, and stages on ranks.

    Attributes:
        placement: Which rank of a replica holds which stage.
        encoder_layers: ``(start, stop)`` per encoder stage.
        llm_layers: The same for the LLM.
    """

    placement: Placement
    encoder_layers: Stages
    llm_layers: Stages


def cut_layers(
    placement: str, num_ranks: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]
) -> LayerCut:
    """Cut both modules for ranks that may hold several stages.

    Args:
        placement: A name in :data:`PLACEMENTS`, but ``one_per_rank``.
        num_ranks: Ranks of a replica.
        encoder_ms: Work of each encoder layer, in any unit.
        llm_ms: The same for the LLM.

    Raises:
        ConfigError: If the modules have too few layers.
    """
    return _CUTS[placement](num_ranks, encoder_ms, llm_ms)


def cut_modules(
    encoder_stages: int, llm_stages: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]
) -> tuple[Stages, Stages]:
    """Each module cut into so many stages with the smallest maximum.

    Raises:
        ConfigError: If a module has fewer layers than stages.
    """
    found = []
    for name, num, layer_ms in (
        ("encoder", encoder_stages, encoder_ms),
        ("LLM", llm_stages, llm_ms),
    ):
        if not 1 <= num <= len(layer_ms):
            raise ConfigError(
                f"{num} {name} stages",
                limit=f"1 to {len(layer_ms)}, one layer per stage",
            )
        found.append(partition_layers(np.asarray(layer_ms, dtype=np.float64), num))
    return found[0], found[1]


def _colocated(num_ranks: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]) -> LayerCut:
    """Both modules spread over all ranks, as DIP does."""
    encoder, llm = min(num_ranks, len(encoder_ms)), min(num_ranks, len(llm_ms))
    if max(encoder, llm) < num_ranks:
        raise ConfigError(
            f"strategy.placement is colocated with {num_ranks} ranks",
            limit=f"a layer of one module per rank, at most {max(encoder, llm)} ranks",
            remedy="use fewer ranks per replica",
        )
    layers = cut_modules(encoder, llm, encoder_ms, llm_ms)
    placement = Placement.colocated(encoder, llm, num_ranks)
    return LayerCut(placement=placement, encoder_layers=layers[0], llm_layers=layers[1])


def _shared_boundary(
    num_ranks: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]
) -> LayerCut:
    """All layers in a row, cut into ranks; one of them may hold layers of both modules."""
    row = np.concatenate([np.asarray(ms, dtype=np.float64) for ms in (encoder_ms, llm_ms)])
    if num_ranks > len(row):
        raise ConfigError(
            f"strategy.placement is shared_boundary with {num_ranks} ranks",
            limit=f"a layer per rank, {len(row)} in all",
            remedy="use fewer ranks per replica",
        )
    middle = len(encoder_ms)
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
    return LayerCut(
        placement=placement,
        encoder_layers=tuple((a, b) for a, b, _ in encoder),
        llm_layers=tuple((a, b) for a, b, _ in llm),
    )


def _v_shaped(num_ranks: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]) -> LayerCut:
    """Two chunks per rank, rank 0 with the first and the last."""
    fitting = [
        encoder
        for encoder in range(1, 2 * num_ranks)
        if encoder <= len(encoder_ms) and 2 * num_ranks - encoder <= len(llm_ms)
    ]
    if not fitting:
        raise ConfigError(
            f"strategy.placement is v_shaped with {num_ranks} ranks",
            limit=f"two chunks of whole layers per rank, {2 * num_ranks} in all",
            remedy="use fewer ranks or placement=shared_boundary",
        )
    # Chunk counts far from the modules' shares of the work are not worth a look.
    ratio = sum(llm_ms) / (sum(encoder_ms) or 1.0)
    even = [e for e in fitting if 0.5 <= e / (2 * num_ranks - e) * ratio <= 2]
    cuts = [_balanced_v(e, 2 * num_ranks - e, encoder_ms, llm_ms) for e in even or fitting]
    return min(cuts, key=lambda cut: cut[0])[1]


def _balanced_v(
    encoder: int, llm: int, encoder_ms: Sequence[float], llm_ms: Sequence[float]
) -> tuple[float, LayerCut]:
    """Move cuts, up to three at a time, while the ranks even out; with the busiest rank's work."""
    placement = Placement.v_shaped(encoder, llm)
    modules = encoder_ms, llm_ms
    sums = [np.concatenate([[0.0], np.cumsum(ms)]).tolist() for ms in modules]
    start = cut_modules(encoder, llm, encoder_ms, llm_ms)
    cuts = [[stop for _, stop in layers][:-1] for layers in start]
    ranks = placement.stage_to_rank

    def loads_of(found: list[list[int]]) -> tuple[list[float], float] | None:
        loads = [0.0] * placement.num_ranks
        squares, stage = 0.0, 0
        for cut, total in zip(found, sums, strict=True):
            for a, b in itertools.pairwise([0, *cut, len(total) - 1]):
                if a >= b or b >= len(total):
                    return None
                chunk = total[b] - total[a]
                loads[ranks[stage]] += chunk
                squares += chunk * chunk
                stage += 1
        return loads, squares

    def score(found: list[list[int]]) -> float:
        held = loads_of(found)
        if held is None:
            return float("inf")
        # Even ranks first; even chunks keep the schedule from stumbling.
        return max(held[0]) + 0.1 * held[1] / (sum(held[0]) or 1.0)

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
    held = loads_of(cuts)
    assert held is not None
    return max(held[0]), LayerCut(
        placement=placement, encoder_layers=layers[0], llm_layers=layers[1]
    )


_CUTS: dict[str, Callable[[int, Sequence[float], Sequence[float]], LayerCut]] = {
    "shared_boundary": _shared_boundary,
    "v_shaped": _v_shaped,
    "colocated": _colocated,
}

PLACEMENTS = ("one_per_rank", *_CUTS)
"""``one_per_rank``: every rank holds layers of one module. ``shared_boundary``: one rank may hold
the encoder's last and the LLM's first. ``v_shaped``: two chunks per rank, down and back up.
``colocated``: a stage of each module on every rank."""


def check_placement(name: object) -> None:
    """Raise ``ConfigError`` for an unknown placement."""
    if name not in PLACEMENTS:
        raise ConfigError(f"placement is {name!r}", limit=f"one of {', '.join(PLACEMENTS)}")
