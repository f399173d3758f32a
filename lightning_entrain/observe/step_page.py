"""The picture of one step: measured against simulated, and where idle time went."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_entrain.observe.charts import bar_chart, gantt, kind_key
from lightning_entrain.observe.idle import StepIdle
from lightning_entrain.observe.page import page, section
from lightning_entrain.observe.step_trace import StepTrace, stage_name
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Placement

IDLE_PARTS = ("compute", "fill and drain", "imbalance", "communication")
"""Where a rank's time goes, in the order of the charts."""


def timeline_page(
    trace: StepTrace, predicted: Sequence[Timeline], idle: StepIdle, step: int
) -> str:
    """A page of its own, for W&B and for the disk."""
    body = section("Timeline", timeline_figures(trace, predicted)) + section(
        "Idle time", idle_figure(idle, rank_names(trace))
    )
    return page(f"Step {step}", f"Bubble {idle.bubble_ratio:.1%} of all ranks' time", body)


def timeline_figures(trace: StepTrace, predicted: Sequence[Timeline]) -> str:
    """Measured and simulated timelines of a trace; see :func:`timeline_charts`."""
    simulated = Timeline.side_by_side(predicted) if predicted else None
    return timeline_charts(trace.timeline, simulated, rank_names(trace))


def timeline_charts(measured: Timeline, simulated: Timeline | None, names: Sequence[str]) -> str:
    """Measured and simulated timelines above each other, on one axis.

    Simulated time is stretched so that all ranks together compute as long as was measured: costs on
    a CPU are nominal, and what is compared is the shape.

    Args:
        measured: All ranks.
        simulated: The same in simulated time, if it is known.
        names: What each rank holds.
    """
    if simulated is not None:
        simulated = _stretched(simulated, measured)
    end_ms = max(_end(measured), _end(simulated) if simulated is not None else 0.0)
    figures = kind_key(measured) + gantt("Measured", measured, names, end_ms=end_ms)
    if simulated is not None:
        figures += gantt("Simulated", simulated, names, end_ms=end_ms)
    return figures


def idle_figure(idle: StepIdle, names: Sequence[str]) -> str:
    """Per rank its time in four parts."""
    bars = [
        (
            name,
            (rank.busy_ms, rank.fill_drain_ms, rank.imbalance_ms, rank.communication_ms),
        )
        for name, rank in zip(names, idle.ranks, strict=True)
    ]
    return bar_chart("Time of each rank", bars, IDLE_PARTS, unit="ms")


def rank_names(trace: StepTrace) -> list[str]:
    """What each rank holds, by global rank."""
    many = len(trace.replicas) > 1
    return [
        (f"replica {index}, " if many else "") + rank_name(replica.schedule.placement, rank)
        for index, replica in enumerate(trace.replicas)
        for rank in range(replica.schedule.placement.num_ranks)
    ]


def rank_name(placement: Placement, rank: int) -> str:
    """What a rank of a replica holds."""
    stages = placement.stages_of(rank)
    if len(stages) == 1:
        return stage_name(stages[0], placement.num_encoder_stages)
    return f"rank {rank}, {len(stages)} stages"


def _end(timeline: Timeline) -> float:
    return max((row.end_ms for row in timeline.rows if row.action.kind.is_compute), default=0.0)


def _stretched(timeline: Timeline, model: Timeline) -> Timeline:
    total = sum(timeline.busy_ms())
    factor = sum(model.busy_ms()) / total if total else 1.0
    rows = tuple(
        TimelineRow(row.rank, row.action, row.start_ms * factor, row.end_ms * factor)
        for row in timeline.rows
    )
    return Timeline(rows=rows, num_ranks=timeline.num_ranks)
