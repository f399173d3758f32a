"""The spread of loads as a torchmetrics metric: one packed state that merges over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_entrain.observe.spread import Spread

_EMPTY = (0.0, 0.0, 0.0, -torch.inf, -torch.inf)


def merge_spreads(packed: Tensor) -> Tensor:
    """Merge packed states into one.

    Args:
        packed: ``[parts, 5]`` float64, each row n, mean, sum of squared deviations from the mean,
            greatest load, minus the least load.

    Returns:
        ``[5]``, the state of all loads together; parts without loads change nothing.
    """
    count, mean, squares, largest, negated_smallest = packed.unbind(-1)
    total = count.sum()
    divisor = total.clamp(min=1.0)
    merged_mean = (count * mean).sum() / divisor
    merged_squares = squares.sum() + (count * (mean - merged_mean) ** 2).sum()
    return torch.stack(
        [total, merged_mean, merged_squares, largest.max(), negated_smallest.max()]
    ).to(packed.dtype)


class SpreadMetric(Metric):
    """Mean, standard deviation, coefficient of variation and extremes of loads.

    The state is one float64 tensor, so a merge over ranks is one gather, and ranks without loads
    take part with a count of 0. Keep the metric in a callback, not in a module: moving a module to
    bfloat16 would take the state along.

    ``compute()`` does not communicate, so it may be called on rank 0 alone; call ``sync()`` on all
    ranks before it for the spread over all of them.

    Args:
        options: As of ``torchmetrics.Metric``.
    """

    full_state_update = False
    higher_is_better = False
    packed: Tensor

    def __init__(self, **options: Any) -> None:
        options.setdefault("sync_on_compute", False)
        # A value from before sync() must not be given again after it.
        options.setdefault("compute_with_cache", False)
        super().__init__(**options)
        self.add_state(
            "packed",
            default=torch.tensor(_EMPTY, dtype=torch.float64),
            dist_reduce_fx=merge_spreads,
        )

    def update(self, loads: Tensor | Iterable[float]) -> None:
        """Add loads.

        Args:
            loads: One number per microbatch, any unit, any shape; none is fine.
        """
        values = torch.as_tensor(
            loads if isinstance(loads, Tensor) else list(loads), dtype=torch.float64
        ).to(self.packed.device)
        if values.numel() == 0:
            return
        mean = values.mean()
        own = torch.stack(
            [
                torch.tensor(float(values.numel()), dtype=torch.float64, device=mean.device),
                mean,
                ((values - mean) ** 2).sum(),
                values.max(),
                -values.min(),
            ]
        )
        self.packed = merge_spreads(torch.stack([self.packed, own]))

    def spread(self) -> Spread:
        """The state as a :class:`Spread`."""
        count, mean, squares, largest, negated_smallest = self.packed.tolist()
        return Spread(
            count=int(count),
            mean=mean,
            squares=squares,
            smallest=-negated_smallest,
            largest=largest,
        )

    def compute(self) -> dict[str, Tensor]:
        """The measures by name: mean, std, cv, max_over_mean, min, max; all 0 without loads."""
        found = self.spread()
        values = {
            "mean": found.mean,
            "std": found.std,
            "cv": found.cv,
            "max_over_mean": found.max_over_mean,
            "min": found.smallest if found.count else 0.0,
            "max": found.largest if found.count else 0.0,
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
