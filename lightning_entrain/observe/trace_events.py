"""A measured step as a Chrome trace, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from typing import Any

from lightning_entrain.observe.step_trace import StepTrace


def trace_events(trace: StepTrace, step: int) -> dict[str, Any]:
    """The trace event format: one process per replica, per rank a row of work and one of waits.

    Args:
        trace: The step.
        step: Its number, for people.
    """
    events: list[dict[str, Any]] = []
    for index, replica in enumerate(trace.replicas):
        placement = replica.schedule.placement
        events.append(_name("process_name", index, 0, f"replica {index}, step {step}"))
        for rank in range(placement.num_ranks):
            stages = ", ".join(
                stage_name(s, placement.num_encoder_stages) for s in placement.stages_of(rank)
            )
            events.append(_name("thread_name", index, 2 * rank, f"rank {rank}: {stages}"))
            events.append(_name("thread_name", index, 2 * rank + 1, f"rank {rank}: waits"))
        for row in replica.timeline.rows:
            waiting = not row.action.kind.is_compute
            events.append(
                {
                    "name": str(row.action),
                    "cat": "wait" if waiting else row.action.kind.value,
                    "ph": "X",
                    "ts": round(row.start_ms * 1e3, 3),
                    "dur": round(row.duration_ms * 1e3, 3),
                    "pid": index,
                    "tid": 2 * row.rank + waiting,
                    "args": {"stage": row.action.stage, "microbatch": row.action.microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def trace_json(trace: StepTrace, step: int) -> str:
    """:func:`trace_events` as text."""
    return json.dumps(trace_events(trace, step), separators=(",", ":"))


def stage_name(stage: int, num_encoder_stages: int) -> str:
    """Name of a stage for people, counted inside its module."""
    if stage < num_encoder_stages:
        return f"encoder stage {stage}"
    return f"LLM stage {stage - num_encoder_stages}"


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
