"""Charts of the HTML pages as SVG: each names itself to screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_entrain.observe.page import scroll, table
from lightning_entrain.observe.svg import covering_ticks, labelled, text
from lightning_entrain.schedule.timeline import Timeline

Points = Sequence[tuple[float, float]]

_MAX_POINTS = 300
_MAX_TABLE_ROWS = 60
_MAX_BARS = 2400
_KIND_CLASS = {"F": "f1", "B": "f2", "I": "f3", "W": "f4"}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: For the key.
        points: (x, y), by x.
        dots: Whether to draw the points alone: values that are known only now and then.
    """

    name: str
    points: Points
    dots: bool = False


def thin(points: Points, most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Evenly chosen points, the last one among them."""
    step = max(1, math.ceil(len(points) / most))
    kept = list(points[::step])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def line_chart(title: str, lines: Sequence[Line], *, unit: str, percent: bool = False) -> str:
    """Values over steps, with the numbers as a folded table below.

    Args:
        title: Of the chart.
        lines: At most three.
        unit: Of the values, for the title.
        percent: Whether values are shares.
    """
    lines = [Line(line.name, thin(line.points), line.dots) for line in lines if line.points]
    if not lines:
        return ""
    factor = 100.0 if percent else 1.0
    width, height, left, right, top, bottom = 460, 210, 50, 12, 12, 36
    xs = [x for line in lines for x, _ in line.points]
    ys = [y * factor for line in lines for _, y in line.points if math.isfinite(y)]
    ticks = covering_ticks(min(0.0, min(ys, default=0.0)), max(ys, default=1.0))
    x_low, x_high = min(xs), max(xs)
    single = x_low == x_high
    if single:  # in the middle, as the only number of the axis
        x_low, x_high = x_low - 1, x_high + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y * factor - ticks[0]) / (ticks[-1] - ticks[0])
        return left + across * (width - left - right), height - bottom - up * (
            height - top - bottom
        )

    parts = []
    for tick in ticks:
        y = place(x_low, tick / factor)[1]
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>')
        parts.append(_tick(left - 8, y + 4, f"{tick:g}{'%' if percent else ''}", anchor="end"))
    for tick in covering_ticks(x_low, x_high, 5):
        if x_low + single <= tick <= x_high - single and tick == int(tick):
            x = place(tick, 0)[0]
            parts.append(_tick(x, height - 19, str(int(tick))))
    parts.append(_tick(width - right, height - 3, "step, from 0", anchor="end"))
    for number, line in enumerate(lines, start=1):
        placed = [place(x, y) for x, y in line.points if math.isfinite(y)]
        if len(placed) == 1 or line.dots:
            parts += [
                f'<circle class="f{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed
            ]
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path class="line s{number}" d="M{path}"/>')
    last = ", ".join(f"{line.name} last {line.points[-1][1] * factor:.4g}" for line in lines)
    svg = labelled(f"{title}: {last}", width, height, *parts)
    rows = [
        (int(x), *(_at(line.points, x, factor) for line in lines))
        for x, _ in thin(lines[0].points, _MAX_TABLE_ROWS)
    ]
    unit = "%" if percent else unit
    heading = f"{title}, {unit}" if unit else title
    numbers = table(
        ["step", *(line.name for line in lines)], rows, label=f"Numbers: {title}", folded=True
    )
    key = line_key(lines) if len(lines) > 1 else ""
    return f"<figure><figcaption>{escape(heading)}</figcaption>{key}{svg}{numbers}</figure>"


def line_key(lines: Sequence[Line]) -> str:
    """Which line is which: told by dashes or dots, not by colour alone."""
    items = "".join(
        '<li><svg viewBox="0 0 28 10" aria-hidden="true">'
        + (
            f'<circle class="f{n}" cx="14" cy="5" r="3.5"/>'
            if line.dots
            else f'<path class="line s{n}" d="M0 5H28"/>'
        )
        + f"</svg>{escape(line.name)}</li>"
        for n, line in enumerate(lines, start=1)
    )
    return f'<ul class="key">{items}</ul>'


def bar_chart(
    title: str, bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, unit: str
) -> str:
    """Horizontal bars, each of one or more parts.

    Args:
        title: Of the chart.
        bars: Name and the parts' values.
        parts: Names of the parts; one for plain bars.
        unit: Of the values.
    """
    if not bars:
        return ""
    width, row, left, right = 560, 30, 190, 62
    height = row * len(bars) + 8
    most = max((sum(values) for _, values in bars), default=0.0) or 1.0
    drawn = []
    for index, (name, values) in enumerate(bars):
        y = 4 + index * row
        drawn.append(f'<text x="{left - 10}" y="{y + 19}" text-anchor="end">{escape(name)}</text>')
        x = float(left)
        for number, value in enumerate(values, start=1):
            length = value / most * (width - left - right)
            css = "fw" if parts[number - 1] == "idle" else f"f{number}"
            drawn.append(
                f'<rect class="{css}" x="{x:.1f}" y="{y + 5}" width="{max(length, 0):.1f}" '
                f'height="20"><title>{escape(name)}: {escape(parts[number - 1])} {value:.4g} '
                f"{escape(unit)}</title></rect>"
            )
            x += length
        drawn.append(_tick(x + 6, y + 19, f"{sum(values):.4g}", anchor="start"))
    summary = "; ".join(f"{name} {sum(values):.4g}" for name, values in bars)
    svg = labelled(f"{title}, {unit}: {summary}", width, height, *drawn)
    rows = [(name, *values) for name, values in bars]
    numbers = table(["name", *parts], rows, label=f"Numbers: {title}", folded=True)
    key = box_key(list(parts)) if len(parts) > 1 else ""
    caption = f"<figcaption>{escape(title)}, {escape(unit)}</figcaption>"
    return f"<figure>{caption}{key}{svg}{numbers}</figure>"


def box_key(names: Sequence[str], classes: Sequence[str] | None = None) -> str:
    """Which filling is which."""
    classes = classes or [f"f{n}" for n in range(1, len(names) + 1)]
    items = "".join(
        f'<li><svg viewBox="0 0 28 12" aria-hidden="true"><rect class="{css}" width="28" '
        f'height="12"/></svg>{escape(name)}</li>'
        for name, css in zip(names, classes, strict=True)
    )
    return f'<ul class="key">{items}</ul>'


def range_chart(title: str, groups: Sequence[Sequence[float]], *, unit: str) -> str:
    """Per microbatch the range, the middle half and the median of its load over steps."""
    groups = [sorted(group) for group in groups]
    if not any(groups):
        return ""
    width, height, left, right, top, bottom = 460, 200, 50, 12, 12, 36
    most = max((group[-1] for group in groups if group), default=1.0)
    ticks = covering_ticks(0.0, most)
    drawn = []

    def up(value: float) -> float:
        return height - bottom - value / ticks[-1] * (height - top - bottom)

    for tick in ticks:
        drawn.append(f'<path class="grid" d="M{left} {up(tick):.1f}H{width - right}"/>')
        drawn.append(_tick(left - 8, up(tick) + 4, f"{tick:g}", anchor="end"))
    slot = (width - left - right) / len(groups)
    thick = min(slot * 0.6, 26)
    every = max(1, math.ceil(len(groups) / 16))
    rows = []
    for index, group in enumerate(groups):
        x = left + slot * (index + 0.5)
        if index % every == 0:
            drawn.append(_tick(x, height - 19, str(index)))
        if not group:
            continue
        low, quarter, middle, three, high = (
            group[0], *(_quantile(group, q) for q in (0.25, 0.5, 0.75)), group[-1],
        )  # fmt: skip
        rows.append((index, low, quarter, middle, three, high))
        box = max(up(quarter) - up(three), 1.5)
        drawn.append(f'<path class="line s1" d="M{x:.1f} {up(low):.1f}V{up(high):.1f}"/>')
        drawn.append(
            f'<rect class="f1" x="{x - thick / 2:.1f}" y="{up(three):.1f}" width="{thick:.1f}" '
            f'height="{box:.1f}"><title>microbatch {index}: median {middle:.4g}, from {low:.4g} to '
            f"{high:.4g} {escape(unit)}</title></rect>"
        )
        drawn.append(
            f'<path class="median" d="M{x - thick / 2:.1f} {up(middle):.1f}h{thick:.1f}"/>'
        )
    drawn.append(_tick(width - right, height - 3, "microbatch", anchor="end"))
    label = f"{title}, {unit}: medians from {min(r[3] for r in rows):.4g} to "
    svg = labelled(label + f"{max(r[3] for r in rows):.4g}", width, height, *drawn)
    numbers = table(
        ["microbatch", "least", "quarter", "median", "three quarters", "most"],
        rows,
        label=f"Numbers: {title}",
        folded=True,
    )
    return (
        f"<figure><figcaption>{escape(title)}, {escape(unit)}</figcaption>{svg}{numbers}</figure>"
    )


def gantt(
    title: str, timeline: Timeline, rank_names: Sequence[str], *, end_ms: float, unit: str = "ms"
) -> str:
    """What each rank did when; waits are not drawn, they are the gaps.

    Args:
        title: Of the chart.
        timeline: Compute actions.
        rank_names: By rank.
        end_ms: Right end of the axis, so that several charts share it.
        unit: Of the axis.
    """
    rows = [row for row in timeline.rows if row.action.kind.is_compute]
    ranks = timeline.num_ranks
    # The page stays small: of many replicas the first ranks are drawn.
    while len(rows) > _MAX_BARS and ranks > 1:
        ranks = (ranks + 1) // 2
        rows = [row for row in rows if row.rank < ranks]
    if ranks < timeline.num_ranks:
        title += f", first {ranks} of {timeline.num_ranks} ranks"
    width, row_height, left, right = 960, 26, 150, 12
    height = row_height * ranks + 30
    scale = (width - left - right) / max(end_ms, 1e-9)
    drawn = []
    for tick in covering_ticks(0.0, end_ms, 6):
        if tick <= end_ms * (1 + 1e-9):
            x = left + tick * scale
            drawn.append(f'<path class="grid" d="M{x:.1f} 0V{height - 26}"/>')
            drawn.append(_tick(x, height - 9, f"{tick:g}"))
    for rank in range(ranks):
        name = rank_names[rank] if rank < len(rank_names) else f"rank {rank}"
        drawn.append(f'<text x="0" y="{rank * row_height + 17}">{escape(name)}</text>')
    for row in rows:
        css = _KIND_CLASS[row.action.kind.value]
        length = max(row.duration_ms * scale - 0.5, 0.5)
        drawn.append(
            f'<rect class="{css}" x="{left + row.start_ms * scale:.1f}" '
            f'y="{row.rank * row_height + 3}" width="{length:.1f}" height="20" rx="1.5">'
            f"<title>{row.action} {row.duration_ms:.3g} {escape(unit)}</title></rect>"
        )
    busy = ", ".join(f"rank {r} busy {ms:.4g}" for r, ms in enumerate(timeline.busy_ms()))
    svg = labelled(f"{title}: {busy} of {end_ms:.4g} {unit}", width, height, *drawn, class_="wide")
    return (
        f"<figure><figcaption>{escape(title)}, {escape(unit)}</figcaption>"
        f"{scroll(svg, label=title)}</figure>"
    )


def kind_key(timeline: Timeline) -> str:
    """Which filling stands for which kind of action, of those that occur."""
    found = {row.action.kind.value for row in timeline.rows if row.action.kind.is_compute}
    kinds = [kind for kind in _KIND_CLASS if kind in found]
    return box_key([KIND_NAMES[kind] for kind in kinds], [_KIND_CLASS[kind] for kind in kinds])


def _tick(x: float, y: float, content: str, *, anchor: str = "middle") -> str:
    return text(float(x), float(y), content, anchor=anchor, class_="tick")


def _at(points: Points, x: float, factor: float) -> object:
    found = [y for step, y in points if step == x]
    return found[0] * factor if found else ""


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
