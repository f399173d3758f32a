"""Plans as files."""

from __future__ import annotations

from pathlib import Path

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.types import ParallelPlan


def read_plan(plan: str | Path | ParallelPlan) -> ParallelPlan:
    """A plan, or the plan in a file.

    Raises:
        ConfigError: If the file is missing or is no plan.
    """
    if isinstance(plan, ParallelPlan):
        return plan
    path = Path(plan)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"strategy.plan={plan} cannot be read: {reason}",
            remedy="write one with entrain-plan",
        ) from error
    return ParallelPlan.from_json(text)
