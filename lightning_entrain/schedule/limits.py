"""What no schedule can beat: ideal, bottleneck and bound of a replica's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.schedule.simulate import StepCosts
from lightning_entrain.schedule.types import Placement, RowCounts


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Lower limits of an iteration, in milliseconds; each is at least the one before.

    Attributes:
        ideal_ms: All work spread evenly over the ranks.
        bottleneck_ms: Work of the busiest rank.
        bound_ms: Largest over ranks of the least fill before it + its work + the least drain after
            it.
    """

    ideal_ms: float
    bottleneck_ms: float
    bound_ms: float


def step_limits(
    placement: Placement, rows: RowCounts, costs: StepCosts, *, splits_gradients: bool
) -> Limits:
    """Limits for one replica, without transfers and without overhead per action.

    Args:
        placement: Which rank holds which stages.
        rows: Rows per microbatch and segment; empty microbatches count for nothing.
        costs: Predicted times.
        splits_gradients: Whether W may be held back (zero bubble): it can fill the drain, which
            then bounds nothing.
    """
    has_rows = np.array([rows.encoder, rows.llm], dtype=np.int64).reshape(2, -1) > 0
    which = (np.arange(placement.num_stages) >= placement.num_encoder_stages).astype(int)
    exists = has_rows[which]
    forward = np.where(exists, costs.forward_ms, 0.0)
    backward = np.where(exists, costs.input_ms + costs.weight_ms, 0.0)
    backward[: placement.first_backward] = 0.0
    needs_encoder = {j for _, j in rows.segments}
    num_skipping = sum(1 for j, n in enumerate(rows.llm) if n and j not in needs_encoder)
    fill = _least_before(placement, forward, exists, num_skipping > 0)
    drain = _least_before(placement, backward, exists, num_skipping > 0)
    work = (forward + backward).sum(axis=1)
    ranks, bounds = [], []
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        total = float(work[list(own)].sum())
        ranks.append(total)
        # A text-only microbatch may reach a later stage of the rank first.
        head = min(fill[s] for s in own)
        tail = 0.0 if splits_gradients else min(drain[s] for s in own)
        bounds.append(total + head + tail if total else 0.0)
    return Limits(ideal_ms=sum(ranks) / len(ranks), bottleneck_ms=max(ranks), bound_ms=max(bounds))


def _least_before(
    placement: Placement,
    times: NDArray[np.float64],
    exists: NDArray[np.bool_],
    some_skip_encoder: bool,
) -> list[float]:
    """Per stage the least time that some microbatch spends on the stages before it."""
    first = placement.num_encoder_stages
    least: list[float] = []
    for stage in range(placement.num_stages):
        encoder = _least(times[: min(stage, first)], exists[0])
        if stage >= first and some_skip_encoder:
            encoder = 0.0
        llm = _least(times[first:stage], exists[-1]) if stage > first else 0.0
        least.append(encoder + llm)
    return least


def _least(times: NDArray[np.float64], exists: NDArray[np.bool_]) -> float:
    """Least column sum over microbatches that exist; 0 without any."""
    if not exists.any():
        return 0.0
    return float(times[:, exists].sum(axis=0).min())
