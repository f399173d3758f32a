"""The report's pictures: pipeline timelines, forward times per microbatch, iteration times."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_entrain.observe.svg import drawing, line, number, tag, text, tick_label, ticks
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.schedule.types import ActionKind

_CLASSES = {ActionKind.F: "f", ActionKind.B: "b", ActionKind.I: "b", ActionKind.W: "w"}

_WIDTH, _GUTTER = 1000.0, 58.0
_ROW, _GAP = 22.0, 4.0


def timeline_figure(
    timeline: Timeline, *, num_encoder_stages: int, scale_ms: float, title: str, key: str
) -> str:
    """One row per rank, one box per action (the paper's figure 12 in this project's terms).

    Args:
        timeline: Of one replica.
        num_encoder_stages: Stages below it are the encoder's.
        scale_ms: Time at the right edge; equal for pictures that are compared.
        title: For the reader and for screen readers.
        key: Unique on the page.
    """
    scale = (_WIDTH - _GUTTER - 8) / (scale_ms or 1.0)
    bottom = timeline.num_ranks * (_ROW + _GAP) - _GAP
    end = timeline.iteration_ms
    parts = []
    for rank in range(timeline.num_ranks):
        y = rank * (_ROW + _GAP)
        parts.append(text(_GUTTER - 8, y + 15.5, f"rank {rank}", anchor="end"))
        parts.append(tag("rect", x=_GUTTER, y=y, width=end * scale, height=_ROW, class_="idle"))
    boxes: list[list[str]] = [[] for _ in range(timeline.num_ranks)]
    for row in timeline.rows:
        module = "e" if row.action.stage < num_encoder_stages else "l"
        label = f"{row.action}: {row.start_ms:.2f} to {row.end_ms:.2f} ms"
        x = _GUTTER + row.start_ms * scale
        top = number(row.rank * (_ROW + _GAP))
        width = number(row.duration_ms * scale)
        boxes[row.rank].append(
            f'<rect class="{module}{_CLASSES[row.action.kind]}" x="{number(x)}" y="{top}" '
            f'width="{width}" height="{number(_ROW)}"><title>{html.escape(label)}</title></rect>'
        )
    parts += [tag("g", *own) for own in boxes if own]
    parts.append(line(_GUTTER + end * scale, -2, _GUTTER + end * scale, bottom + 6, class_="end"))
    for value in ticks(scale_ms, 8):
        x = _GUTTER + value * scale
        parts.append(line(x, bottom + 3, x, bottom + 8, class_="axis"))
        parts.append(text(x, bottom + 22, tick_label(value, scale_ms), anchor="middle"))
    parts.append(text(_GUTTER - 8, bottom + 22, "ms", anchor="end"))
    busy = timeline.busy_ms()
    share = [f"{100 * own / end:.0f} %" if end else "0 %" for own in busy]
    return drawing(
        _WIDTH,
        bottom + 30,
        parts,
        title=title,
        description=f"The step takes {end:.1f} ms. Ranks compute, from the first to the last, "
        f"{', '.join(share)} of it.",
        key=key,
    )


def spread_figure(
    times_ms: Sequence[float], *, module: str, scale_ms: float, title: str, key: str
) -> str:
    """Forward time of each microbatch, in the order they run (the paper's figure 15).

    Args:
        times_ms: Per microbatch.
        module: ``encoder`` or ``llm``; sets the colour.
        scale_ms: Height of the picture.
        title: For screen readers.
        key: Unique on the page.
    """
    width, height, gutter, top = 440.0, 168.0, 46.0, 8.0
    bottom = height - 24
    scale = (bottom - top) / (scale_ms or 1.0)
    parts = []
    for value in ticks(scale_ms, 4):
        y = bottom - value * scale
        parts.append(line(gutter, y, width - 4, y, class_="grid"))
        parts.append(text(gutter - 6, y + 4, tick_label(value, scale_ms), anchor="end"))
    step = (width - gutter - 8) / max(len(times_ms), 1)
    bars = []
    for index, value in enumerate(times_ms):
        x = gutter + 2 + index * step
        bars.append(
            f'<rect class="{module[0]}f" x="{number(x)}" y="{number(bottom - value * scale)}" '
            f'width="{number(step * 0.82)}" height="{number(value * scale)}">'
            f"<title>microbatch {index}: {value:.2f} ms</title></rect>"
        )
    parts.append(tag("g", *bars) if bars else "")
    mean = sum(times_ms) / len(times_ms) if times_ms else 0.0
    y = bottom - mean * scale
    parts.append(line(gutter, y, width - 4, y, class_="mean"))
    parts.append(line(gutter, bottom, width - 4, bottom, class_="axis"))
    parts.append(text(gutter, height - 8, "microbatch 0", anchor="start"))
    parts.append(text(width - 4, height - 8, str(max(len(times_ms) - 1, 0)), anchor="end"))
    low, high = (min(times_ms), max(times_ms)) if times_ms else (0.0, 0.0)
    return drawing(
        width,
        height,
        parts,
        title=title,
        description=f"{len(times_ms)} microbatches of {low:.2f} to {high:.2f} ms, mean "
        f"{mean:.2f} ms.",
        key=key,
    )


@dataclass(frozen=True, kw_only=True)
class IterationBar:
    """One policy's iteration and its limits, in milliseconds."""

    name: str
    iteration_ms: float
    ideal_ms: float
    bottleneck_ms: float
    speedup: float


def iteration_figure(bars: Sequence[IterationBar], *, title: str, key: str) -> str:
    """Iteration per policy with marks at its ideal and its busiest rank's work."""
    width, row, edge = 480.0, 46.0, 2.0
    largest = max((bar.iteration_ms for bar in bars), default=1.0) or 1.0
    scale = (width - 2 * edge) / largest
    parts = []
    for index, bar in enumerate(bars):
        y = index * row
        label = f"{bar.iteration_ms:,.1f} ms, {bar.speedup:.2f} x"
        parts.append(text(edge, y + 13, bar.name, class_="t b"))
        parts.append(text(width - edge, y + 13, label, anchor="end"))
        length = bar.iteration_ms * scale
        parts.append(tag("rect", x=edge, y=y + 20, width=length, height=16.0, class_="bar"))
        for value, name in ((bar.ideal_ms, "ideal"), (bar.bottleneck_ms, "bottleneck")):
            x = edge + value * scale
            parts.append(line(x, y + 17, x, y + 39, class_=name))
    parts.append(line(edge, 18, edge, len(bars) * row - 8, class_="axis"))
    said = "; ".join(f"{bar.name} {bar.iteration_ms:.1f} ms" for bar in bars)
    return drawing(width, len(bars) * row + 4, parts, title=title, description=said, key=key)
