"""A plan as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_entrain.plan.types import ParallelPlan


def print_plan(plan: ParallelPlan, console: Console | None = None) -> None:
    """Print a plan's stages, and what it predicts.

    Args:
        plan: The plan.
        console: Where to; standard output if None.
    """
    console = console or Console(highlight=False)
    console.print(f"[bold]{plan_title(plan)}[/bold]", soft_wrap=True)
    table = Table()
    for heading, justify in (
        ("stage", "left"), ("layers", "left"), ("share of the slowest", "right"),
        ("memory, GiB", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    several = plan.stage_to_rank is not None
    if several:
        table.add_column("rank", justify="right")
    most = max((stage.time_ms for stage in plan.stages), default=0.0) or 1.0
    for rank, stage in zip(plan.placement.stage_to_rank, plan.stages, strict=False):
        table.add_row(
            "encoder" if stage.module == "encoder" else "LLM",
            f"{stage.start}-{stage.stop - 1}",
            f"{stage.time_ms / most:.0%}",
            f"{stage.memory_gib:.3f}",
            *([str(rank)] if several else []),
        )
    console.print(table)


def plan_title(plan: ParallelPlan) -> str:
    """The plan in one line."""
    text = (
        f"Plan: {plan.dp} replica{'s' * (plan.dp > 1)} of {plan.encoder_stages} encoder and "
        f"{plan.llm_stages} LLM stage{'s' * (plan.llm_stages > 1)}, {plan.num_microbatches} "
        f"microbatches, global batch {plan.global_batch_size}"
    )
    return text if plan.b_min is None else f"{text} (b_min {plan.b_min})"
