"""What `entrain-simulate` prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_entrain.simulation.setting import Comparison


def print_comparison(
    found: Comparison, *, files: Sequence[Path] = (), console: Console | None = None
) -> None:
    """Print the setting, a row per policy, warnings and the files.

    Args:
        found: What was simulated.
        files: What was written.
        console: Where to print; standard output if None.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 140)
    for line in setting_lines(found):
        console.print(Text(line))
    console.print(_speed_table(found))
    console.print(_spread_table(found))
    console.print(
        Text(
            "Iteration: slowest replica, mean over the batches. Ideal: all work spread evenly over "
            "all ranks. Bottleneck: work of the busiest rank. Planning: assignment and one "
            "replica's schedule."
        )
    )
    if note := costs_note(found):
        console.print(Text(note))
    for warning in found.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    if files:
        console.print(Text("Written: " + ", ".join(map(str, files))))
        console.print(Text("Open report.html in a browser, the traces in ui.perfetto.dev"))


def setting_lines(found: Comparison) -> list[str]:
    """The setting in a few lines for people."""
    setting, plan = found.setting, found.setting.parallel_plan
    cluster = setting.request.cluster
    live = setting.max_live
    memory = "one mean microbatch more than there are ranks" if live is None else f"{live:g} mean"
    if setting.memory_gib is not None:
        memory = f"{setting.memory_gib:g} GiB per device"
    transfers = "counted" if setting.communication else "not counted"
    batches = "batch" if setting.num_batches == 1 else "batches"
    return [
        f"{setting.request.model.name} on {found.described['data']}: {setting.num_batches} global "
        f"{batches} of {plan.global_batch_size}, seed {setting.seed}",
        f"{cluster.num_gpus} x {cluster.device.name}: {plan.dp} replicas, tensor parallelism "
        f"{plan.encoder_tp} and {plan.llm_tp}, {setting.stages.splits} encoder:LLM stages "
        f"({setting.placement}), {plan.num_microbatches} microbatches",
        f"Costs: {setting.costing.name}; transfers {transfers}; overhead per action "
        f"{100 * setting.overhead:g} % of the mean F; activations per rank of chosen schedules: "
        f"{memory}",
    ]


def costs_note(found: Comparison) -> str:
    """How these times relate to what `entrain-plan` predicts of the same plan; empty if alike."""
    setting = found.setting
    if setting.costs != "flops":
        return ""
    plan = setting.parallel_plan
    predicted = plan.iteration_ms if plan.evaluated_ms is None else plan.evaluated_ms
    return (
        "Times count operations at the device's best speed, to compare policies; entrain-plan "
        f"predicts {predicted:,.0f} ms for its plan with {setting.request.cost_model.name} costs, "
        "as costs=model does here."
    )


def _speed_table(found: Comparison) -> Table:
    grid = Table(title="Speed", title_justify="left")
    for name in (
        "policy",
        "schedule",
        "stages",
        "K",
        "iteration ms",
        f"x {found.names[found.baseline]}",
        "/ ideal",
        "/ bottleneck",
        "bubble %",
        "GiB",
        "planning ms",
    ):
        grid.add_column(name, justify="left" if name in ("policy", "schedule") else "right")
    fastest = min(result.iteration_ms for result in found.results)
    for index, (name, result) in enumerate(zip(found.names, found.results, strict=True)):
        grid.add_row(
            name,
            result.schedule,
            result.plan.splits,
            result.counts_text,
            f"{result.iteration_ms:,.1f}",
            f"{found.speedup(index):.2f}",
            f"{result.over_ideal:.3f}",
            f"{result.over_bottleneck:.3f}",
            f"{100 * result.bubble_ratio:.1f}",
            f"{max(result.peak_gib):.1f}",
            f"{result.planning_ms:.0f}",
            style="bold" if result.iteration_ms == fastest else "",
        )
    return grid


def _spread_table(found: Comparison) -> Table:
    grid = Table(title="Forward time per microbatch", title_justify="left")
    for name in ("policy", "encoder std ms", "CV %", "LLM std ms", "CV %"):
        grid.add_column(name, justify="left" if name == "policy" else "right")
    for name, result in zip(found.names, found.results, strict=True):
        cells = [
            cell
            for spread in (result.encoder, result.llm)
            for cell in (f"{spread.std:.2f}", f"{100 * spread.cv:.1f}")
        ]
        grid.add_row(name, *cells)
    return grid
