"""Draw a table as a chart, the same bytes every time."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_entrain.data.charts.tables import Table

_PALETTES = ("tab10", "Set2", "Dark2", "Paired", "viridis", "Pastel1", "Accent", "plasma")
_FAMILIES = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono")


def fix_style() -> None:
    """Make drawing independent of the user's settings and installed fonts, in this process."""
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({"svg.hashsalt": "lightning_entrain", "font.family": "DejaVu Sans"})
    shipped = Path(matplotlib.get_data_path())
    manager = font_manager.fontManager
    manager.ttflist = [font for font in manager.ttflist if shipped in Path(font.fname).parents]


def draw_chart(table: Table, kind: str, width: int, height: int, state: random.Random) -> bytes:
    """Draw one chart.

    Args:
        table: What to show.
        kind: One of ``table.kinds``.
        width: Width in pixels.
        height: Height in pixels.
        state: Source of all choices of style.

    Returns:
        A PNG file.
    """
    # Small pictures are drawn as thumbnails of a readable chart, large ones with more room.
    dpi = max(24.0, min(width, height) / state.uniform(2.6, 5.5))
    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi)
    FigureCanvasAgg(figure)
    figure.set_facecolor(state.choice(("white", "white", "#f6f2ea", "#eef3f8")))
    family, size = state.choice(_FAMILIES), state.uniform(6.0, 9.5)
    with (
        matplotlib.rc_context({"font.family": family, "font.size": size}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        palette = matplotlib.colormaps[state.choice(_PALETTES)]
        colours = [
            palette(i / 9) if palette.N > 20 else palette(i) for i in range(min(palette.N, 10))
        ]
        state.shuffle(colours)
        if kind == "pie":
            _pie(figure, table, colours, state)
        else:
            _axes(figure, table, kind, colours, state)
        file = io.BytesIO()
        figure.savefig(
            file,
            format="png",
            facecolor=figure.get_facecolor(),
            metadata={"Software": None},
            pil_kwargs={"compress_level": 3},
        )
    return file.getvalue()


def _pie(figure: Figure, table: Table, colours: list[Any], state: random.Random) -> None:
    axes = figure.add_axes((0.05, 0.04, 0.9, 0.82))
    axes.pie(
        [float(row[1]) for row in table.rows],
        labels=[f"{row[0]}: {row[1]}" for row in table.rows],
        colors=colours,
        startangle=state.choice((0, 90, 180)),
        wedgeprops={"width": state.choice((1.0, 1.0, 0.45)), "edgecolor": "white"},
        radius=0.8,
    )
    axes.set_title(table.title)


def _axes(
    figure: Figure, table: Table, kind: str, colours: list[Any], state: random.Random
) -> None:
    labels = [row[0] for row in table.rows]
    longest = max(len(label) for label in labels)
    left = 0.28 if kind == "barh" and longest > 4 else 0.16
    turned = kind != "barh" and kind != "scatter" and longest * len(labels) > 30
    bottom = 0.32 if turned and longest > 4 else 0.16
    axes = figure.add_axes((left, bottom, 0.96 - left, 0.88 - bottom))
    if kind == "scatter":
        axes.scatter(
            [float(label) for label in labels],
            [float(row[1]) for row in table.rows],
            color=colours[0],
            marker=state.choice(("o", "s", "^", "D")),
            s=state.uniform(8, 40),
        )
        axes.set_xlabel(table.header[0])
        axes.set_ylabel(table.header[1])
    else:
        _columns(axes, table, kind, colours, state)
        ticks = range(len(labels))
        if kind == "barh":
            axes.set_yticks(ticks, labels)
            axes.set_ylabel(table.header[0])
        else:
            axes.set_xticks(ticks, labels, rotation=90 if turned else 0)
            axes.set_xlabel(table.header[0])
        if len(table.header) > 2:
            axes.legend(fontsize="small", framealpha=0.6)
        elif kind == "barh":
            axes.set_xlabel(table.header[1])
        else:
            axes.set_ylabel(table.header[1])
    axes.set_title(table.title)
    if state.random() < 0.5:
        axes.grid(alpha=0.4)
    axes.set_axisbelow(True)
    if state.random() < 0.4:
        axes.spines[["top", "right"]].set_visible(False)


def _columns(axes: Any, table: Table, kind: str, colours: list[Any], state: random.Random) -> None:
    places = range(len(table.rows))
    num_columns = len(table.header) - 1
    floor = [0.0] * len(table.rows)
    marker = state.choice((None, "o", "s", "."))
    for c in range(num_columns):
        values = [float(row[c + 1] or "nan") for row in table.rows]
        style = {"color": colours[c], "label": table.header[c + 1]}
        if kind == "line":
            axes.plot(places, values, marker=marker, **style)
        elif kind == "stacked":
            values = [0.0 if value != value else value for value in values]
            axes.bar(places, values, 0.8, bottom=floor, **style)
            floor = [a + b for a, b in zip(floor, values, strict=True)]
        else:
            breadth = 0.8 / num_columns
            moved = [place - 0.4 + (c + 0.5) * breadth for place in places]
            (axes.barh if kind == "barh" else axes.bar)(moved, values, breadth, **style)
