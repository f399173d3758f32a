"""What `entrain-plan` prints."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_entrain.plan.planner import PlanReport
from lightning_entrain.plan.types import ParallelPlan


def print_report(
    report: PlanReport, *, output: str | None = None, console: Console | None = None
) -> None:
    """Print workload, b_min, splits per batch size, plans and stages.

    Args:
        report: What was planned.
        output: Where the plan was written, if it was.
        console: Where to print; standard output if None.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_heading(report))
    console.print(_workload_table(report))
    console.print(_share_text(report))
    console.print(_trials_table(report))
    console.print(_plans_table(report))
    console.print(_stages_table(report.plan))
    console.print(Text(f"Limited by: {report.plan.limited_by}"))
    console.print(Text(costs_note(report)))
    for warning in report.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    if report.plan.not_runnable:
        fields = ", ".join(report.plan.not_runnable)
        text = (
            f"Not runnable yet: {fields}. Choose among runnable plans with runnable_only=true "
            "encoder_tp=null llm_tp=null"
        )
        console.print(Text(text, style="yellow"))
    if output:
        use = "" if report.plan.not_runnable else f"; use it with strategy.plan={output}"
        console.print(Text(f"Plan written to {output}{use}"))


def _heading(report: PlanReport) -> Text:
    request = report.request
    encoder, llm = request.model.encoder, request.model.llm
    return Text(
        f"{request.model.name}: encoder {encoder.num_parameters / 1e6:,.0f} M parameters, "
        f"LLM {llm.num_parameters / 1e6:,.0f} M; {request.cluster.num_gpus} x "
        f"{request.cluster.device.name}; costs {request.cost_model.name}"
    )


def _workload_table(report: PlanReport) -> Table:
    table = report.request.table
    grid = Table(title=f"Workload of {len(table):,} samples", title_justify="left")
    for name in ("", "mean", "std", "largest"):
        grid.add_column(name, justify="left" if not name else "right")
    for name, column in (
        ("patches", table.num_patches),
        ("vision tokens", table.num_vision_tokens),
        ("text tokens", table.num_text_tokens),
    ):
        grid.add_row(name, f"{column.mean():,.0f}", f"{column.std():,.0f}", f"{column.max():,}")
    return grid


def _share_text(report: PlanReport) -> Text:
    found = report.profile.b_min
    share = found.proportions[0]
    low, high = found.interval
    return Text(
        f"Encoder's share of the work: {share:.3f} ({share * found.num_gpus:.2f} of "
        f"{found.num_gpus} devices); in 95 % of batches of b_min between {low:.3f} and {high:.3f}"
    )


def costs_note(report: PlanReport) -> str:
    """What predicts the step times, and why `entrain-simulate` tells others."""
    how = "the closed formula" if report.plan.evaluated_ms is None else "simulation"
    return (
        f"Step ms: by {how} with {report.request.cost_model.name} costs; entrain-simulate counts "
        "operations at the device's best speed unless costs=model, so its times of the same plan "
        "are shorter."
    )


def _trials_table(report: PlanReport) -> Table:
    found = report.profile.b_min
    state = "stable" if found.stable else "not stable at the largest batch tried"
    grid = Table(
        title=f"b_min = {found.b_min} ({state}); split of {found.num_gpus} devices per batch size",
        title_justify="left",
    )
    grid.add_column("batch", justify="right")
    grid.add_column("encoder:LLM splits seen (times)", min_width=40)
    for size, seen in report.profile.trials.items():
        parts = [
            f"{':'.join(map(str, allocation))} ({count})"
            for allocation, count in sorted(seen.items(), reverse=True)
        ]
        grid.add_row(str(size), "  ".join(parts))
    return grid


def _plans_table(report: PlanReport) -> Table:
    result = report.result
    grid = Table(
        title=f"Plans: best of {result.num_candidates:,} topologies "
        f"({result.num_too_large:,} of those looked at do not fit)",
        title_justify="left",
    )
    for name in ("", "dp", "encoder", "LLM", "K", "step ms", "tokens/s", "GiB", "runnable"):
        grid.add_column(name, justify="right")
    for index, plan in enumerate(result.plans):
        grid.add_row(
            "chosen" if index == 0 else str(index + 1),
            str(plan.dp),
            _module_text(plan.encoder_stages, plan.encoder_tp),
            _module_text(plan.llm_stages, plan.llm_tp),
            str(plan.num_microbatches),
            f"{plan.iteration_ms if plan.evaluated_ms is None else plan.evaluated_ms:,.0f}",
            f"{plan.tokens_per_s:,.0f}",
            f"{max(stage.memory_gib for stage in plan.stages):.1f}",
            "no" if plan.not_runnable else "yes",
            style="bold" if index == 0 else "",
        )
    return grid


def _module_text(stages: int, tp: int) -> str:
    text = f"{stages} stage" + ("s" if stages > 1 else "")
    return f"{text} x tp {tp}" if tp > 1 else text


def _stages_table(plan: ParallelPlan) -> Table:
    grid = Table(title="Stages of the chosen plan, per microbatch and device", title_justify="left")
    for name in (
        "stage",
        "module",
        "layers",
        "forward ms",
        "backward ms",
        "in flight",
        "state GiB",
        "activations GiB",
        "buffers GiB",
        "GiB",
    ):
        grid.add_column(name, justify="left" if name == "module" else "right")
    for index, stage in enumerate(plan.stages):
        grid.add_row(
            str(index),
            stage.module,
            f"{stage.start}-{stage.stop - 1}",
            f"{stage.forward_ms:.1f}",
            f"{stage.backward_ms:.1f}",
            str(stage.in_flight),
            f"{stage.state_gib:.1f}",
            f"{stage.activation_gib:.1f}",
            f"{stage.buffer_gib:.1f}",
            f"{stage.memory_gib:.1f}",
        )
    return grid
