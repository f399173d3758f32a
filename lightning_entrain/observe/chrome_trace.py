"""Timelines in Chrome's trace format, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_entrain.schedule.timeline import Timeline


def chrome_trace(timelines: Sequence[Timeline], *, name: str = "") -> dict[str, Any]:
    """One process per replica, one row (thread) per rank, one complete event per action.

    Args:
        timelines: One per replica, in milliseconds.
        name: Of the whole trace.

    Returns:
        A record that json can write. Times are in microseconds, as the format asks.
    """
    events: list[dict[str, Any]] = []
    for replica, timeline in enumerate(timelines):
        events.append(_name("process_name", f"replica {replica}", pid=replica, tid=0))
        for rank in range(timeline.num_ranks):
            events.append(_name("thread_name", f"rank {rank}", pid=replica, tid=rank))
        for row in timeline.rows:
            action = row.action
            events.append(
                {
                    "name": str(action),
                    "cat": action.kind.value,
                    "ph": "X",
                    "ts": row.start_ms * 1e3,
                    "dur": row.duration_ms * 1e3,
                    "pid": replica,
                    "tid": row.rank,
                    "args": {
                        "stage": action.stage,
                        "kind": action.kind.value,
                        "microbatch": action.microbatch,
                        "target": action.target,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name}}


def _name(what: str, value: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}
