"""Which schedule a step runs: names that users choose from, and what builds them."""

from __future__ import annotations

from collections.abc import Callable

from lightning_entrain.errors import ConfigError
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.types import Placement, RowCounts, Schedule
from lightning_entrain.schedule.zero_bubble import build_zero_bubble

AUTO = "auto"
"""Simulate all schedules for each step and take the fastest."""

Builder = Callable[[Placement, RowCounts], Schedule]


def _plain(placement: Placement, rows: RowCounts) -> Schedule:
    return build_1f1b(placement, rows)


def _split(placement: Placement, rows: RowCounts) -> Schedule:
    return build_1f1b(placement, rows, split_backward=True)


def _eager(placement: Placement, rows: RowCounts) -> Schedule:
    """Encoder stages run one more forward ahead, which deferral by one microbatch needs."""
    stages = placement.num_stages
    caps = [stages - s + (s < placement.num_encoder_stages) for s in range(stages)]
    return build_1f1b(placement, rows, split_backward=True, caps=caps)


def _zero_bubble(placement: Placement, rows: RowCounts) -> Schedule:
    if placement.num_ranks != placement.num_stages:
        return _split(placement, rows)
    return build_zero_bubble(placement, rows)


SCHEDULES: dict[str, Builder] = {
    "1f1b": _plain,
    "1f1b_split": _split,
    "1f1b_eager": _eager,
    "zero_bubble": _zero_bubble,
}
"""Schedules by name: 1F1B; with backward by segment; with eager encoder forwards as well (Entrain,
section 5.3); and zero bubble with backward split into I and W (ZB-H1, Qi et al., ICLR 2024)."""


SPLIT = frozenset({"zero_bubble"})
"""Schedules that split B into I and W."""


def check_schedule(name: str, *, may_split: bool = True) -> str:
    """The name, if there is such a schedule.

    Args:
        name: Name of a schedule.
        may_split: Whether B may be split into I and W.

    Raises:
        ConfigError: If there is none, or it splits B where that may not be.
    """
    if name in SPLIT and not may_split:
        raise ConfigError(
            f"schedule is {name!r} with compile=True",
            limit="compiled layers compute the gradients of inputs and weights together",
            remedy="set compile=False, or schedule='auto', which then leaves such schedules out",
        )
    if name != AUTO and name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}", limit=f"one of {', '.join((AUTO, *SCHEDULES))}")
    return name
