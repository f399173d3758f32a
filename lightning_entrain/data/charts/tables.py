"""Small tables cut from the real data sets that the package vega_datasets ships.

The files are read where they are installed; nothing is fetched, and neither pandas nor
vega_datasets is imported.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_entrain.errors import DataError

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a chart shows.

    Attributes:
        title: Title of the chart.
        header: Name of the row labels, then the names of the columns.
        rows: Per row its label, then its numbers as text, as they are drawn.
        kinds: Kinds of chart that can show it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]


BARS = ("bar", "barh", "stacked")
LINES = ("line", "bar")
Recipe = Callable[[random.Random, int], Table]


@cache
def read_records(name: str) -> tuple[Record, ...]:
    """All records of a shipped file, numbers as floats where the file says so.

    Raises:
        DataError: If vega_datasets or the file is not installed.
    """
    spec = find_spec("vega_datasets")
    folder = Path((spec.submodule_search_locations or [""])[0]) / "_data" if spec else None
    if folder is None or not (folder / name).is_file():
        raise DataError(
            f"The table {name} of the package vega_datasets is not installed",
            limit="the chart generator needs the extra 'demo'",
            remedy='pip install "lightning_entrain[demo]"',
        )
    text = (folder / name).read_text(encoding="utf-8-sig")
    if name.endswith(".json"):
        return tuple(json.loads(text))
    return tuple(csv.DictReader(text.splitlines()))


def draw_table(random_state: random.Random, max_rows: int) -> Table:
    """A random table with real numbers.

    Args:
        random_state: Source of all choices.
        max_rows: Most rows, at least 2.
    """
    return random_state.choice(_RECIPES)(random_state, max(2, max_rows))


def number_text(value: float) -> str:
    """A number rounded to three significant digits, without exponent."""
    rounded = float(f"{value:.3g}")
    return str(int(rounded)) if rounded == int(rounded) else f"{rounded:.10g}"


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _means(
    name: str, title: str, labels: dict[str, str], values: dict[str, str], *, start: int = 0
) -> Recipe:
    """Means of some columns, grouped by one; ``start`` cuts a year out of a date."""

    def make(state: random.Random, max_rows: int) -> Table:
        key = state.choice(sorted(labels))
        columns = state.sample(sorted(values), state.randint(1, min(3, len(values))))
        groups: dict[str, list[Record]] = {}
        for record in read_records(name):
            groups.setdefault(str(record[key])[: start or None], []).append(record)
        chosen = _window(state, sorted(groups), max_rows)
        rows = []
        for label in chosen:
            means = []
            for column in columns:
                known = [x for r in groups[label] if (x := _number(r.get(column))) is not None]
                means.append(number_text(sum(known) / len(known)) if known else "")
            rows.append((label, *means))
        header = (labels[key], *(values[column] for column in columns))
        return _table(f"{title} by {labels[key].lower()}", header, rows, (*BARS, "line"))

    return make


def _series(
    name: str,
    title: str,
    key: str,
    label: str,
    values: dict[str, str],
    *,
    length: int | None = None,
) -> Recipe:
    """Some columns over consecutive records."""

    def make(state: random.Random, max_rows: int) -> Table:
        columns = state.sample(sorted(values), state.randint(1, min(4, len(values))))
        records = _window(state, read_records(name), max_rows)
        rows = [
            (str(r[key])[:length], *(_text(r.get(column)) for column in columns)) for r in records
        ]
        return _table(title, (label, *(values[c] for c in columns)), rows, LINES)

    return make


def _pivot(
    name: str,
    title: str,
    row: tuple[str, str],
    column: str,
    value: str,
    *,
    length: int | None = None,
) -> Recipe:
    """One column's values as columns, another's as rows."""

    def make(state: random.Random, max_rows: int) -> Table:
        cells: dict[str, dict[str, str]] = {}
        for record in read_records(name):
            label = str(record[row[0]])[:length]
            cells.setdefault(label, {})[str(record[column])] = _text(record.get(value))
        names = sorted({name for line in cells.values() for name in line})
        columns = state.sample(names, state.randint(1, min(4, len(names))))
        full = [label for label, line in cells.items() if all(name in line for name in columns)]
        rows = [
            (label, *(cells[label][name] for name in columns))
            for label in _window(state, full, max_rows)
        ]
        return _table(title, (row[1], *columns), rows, ("line", *BARS))

    return make


def _counts(name: str, title: str, keys: dict[str, str]) -> Recipe:
    """How often the commonest values of a column occur."""

    def make(state: random.Random, max_rows: int) -> Table:
        key = state.choice(sorted(keys))
        counts: dict[str, int] = {}
        for record in read_records(name):
            if record.get(key) not in ("", None):
                counts[str(record[key])] = counts.get(str(record[key]), 0) + 1
        labels = sorted(counts, key=lambda label: (-counts[label], label))[: 4 * max_rows]
        labels = state.sample(labels, min(len(labels), max_rows, 9))
        rows = [(label, number_text(counts[label])) for label in labels]
        return _table(title, (keys[key], "Count"), rows, ("pie", "pie", "bar", "barh"))

    return make


def _points(name: str, title: str, values: dict[str, str], *, by: str | None = None) -> Recipe:
    """Two numeric columns of some records."""

    def make(state: random.Random, max_rows: int) -> Table:
        x, y = state.sample(sorted(values), 2)
        records = [
            r for r in read_records(name) if None not in (_number(r.get(x)), _number(r.get(y)))
        ]
        if by is not None:
            group = state.choice(sorted({str(r[by]) for r in records}))
            records = [r for r in records if str(r[by]) == group]
        chosen = state.sample(records, min(len(records), 2 * max_rows))
        rows = sorted(
            {(_text(r[x]), _text(r[y])) for r in chosen}, key=lambda r: (float(r[0]), float(r[1]))
        )
        heading = title if by is None else f"{title} ({group})"
        return _table(heading, (values[x], values[y]), rows, ("scatter",))

    return make


def _table(
    title: str, header: Sequence[str], rows: Sequence[tuple[str, ...]], kinds: tuple[str, ...]
) -> Table:
    numbers = [float(text) for row in rows for text in row[1:] if text]
    if any(number < 0 for number in numbers):
        kinds = tuple(kind for kind in kinds if kind not in ("stacked", "pie"))
    return Table(title=title, header=tuple(header), rows=tuple(rows), kinds=kinds)


def _text(value: Any) -> str:
    number = _number(value)
    return "" if number is None else number_text(number)


def _window(state: random.Random, items: Sequence[Any], max_items: int) -> list[Any]:
    length = min(len(items), state.randint(min(2, max_items), max_items))
    start = state.randint(0, len(items) - length)
    return list(items[start : start + length])


_CARS = {
    "Miles_per_Gallon": "Miles per gallon",
    "Horsepower": "Horsepower",
    "Weight_in_lbs": "Weight (lb)",
    "Acceleration": "Acceleration",
    "Displacement": "Displacement",
}
_IRIS = {
    "sepalLength": "Sepal length",
    "sepalWidth": "Sepal width",
    "petalLength": "Petal length",
    "petalWidth": "Petal width",
}
_WEATHER = {
    "precipitation": "Precipitation (mm)",
    "temp_max": "Highest (C)",
    "temp_min": "Lowest (C)",
    "wind": "Wind (m/s)",
}
_JOBS = {
    "construction": "Construction",
    "manufacturing": "Manufacturing",
    "retail_trade": "Retail",
    "information": "Information",
    "financial_activities": "Finance",
    "leisure_and_hospitality": "Leisure",
    "government": "Government",
    "utilities": "Utilities",
}
_RECIPES: tuple[Recipe, ...] = (
    _means("cars.json", "Cars", {"Origin": "Origin", "Cylinders": "Cylinders"}, _CARS),
    _means("cars.json", "Cars", {"Year": "Year"}, _CARS, start=4),
    _points("cars.json", "Cars", _CARS, by="Origin"),
    _counts("cars.json", "Cars", {"Origin": "Origin", "Cylinders": "Cylinders"}),
    _means("iris.json", "Iris flowers", {"species": "Species"}, _IRIS),
    _points("iris.json", "Iris", _IRIS, by="species"),
    _means("seattle-weather.csv", "Seattle weather", {"date": "Month"}, _WEATHER, start=7),
    _means("seattle-weather.csv", "Seattle", {"weather": "Weather"}, _WEATHER),
    _series("seattle-weather.csv", "Days in Seattle", "date", "Date", _WEATHER),
    _counts("seattle-weather.csv", "Days in Seattle", {"weather": "Weather"}),
    _means("seattle-temps.csv", "Temperature in Seattle", {"date": "Day"}, {"temp": "F"}, start=10),
    _means(
        "sf-temps.csv", "Temperature in San Francisco", {"date": "Day"}, {"temp": "F"}, start=10
    ),
    _pivot("stocks.csv", "Share prices", ("date", "Month"), "symbol", "price"),
    _pivot(
        "iowa-electricity.csv",
        "Power in Iowa",
        ("year", "Year"),
        "source",
        "net_generation",
        length=4,
    ),
    _pivot("barley.json", "Barley yield", ("variety", "Variety"), "site", "yield"),
    _pivot("barley.json", "Barley yield", ("site", "Site"), "variety", "yield"),
    _series("us-employment.csv", "Jobs, thousands", "month", "Month", _JOBS, length=7),
    _series("wheat.json", "Wheat and wages", "year", "Year", {"wheat": "Wheat", "wages": "Wages"}),
    _series(
        "crimea.json",
        "Deaths in the Crimea",
        "date",
        "Month",
        {"wounds": "Wounds", "other": "Other", "disease": "Disease"},
        length=7,
    ),
    _series(
        "ohlc.json",
        "Prices",
        "date",
        "Date",
        {"open": "Open", "high": "High", "low": "Low", "close": "Close"},
    ),
    _series(
        "burtin.json",
        "Antibiotics",
        "Bacteria",
        "Bacteria",
        {"Penicillin": "Penicillin", "Streptomycin": "Streptomycin", "Neomycin": "Neomycin"},
    ),
    _points("driving.json", "Driving", {"miles": "Miles", "gas": "Price of gas"}),
    _points("anscombe.json", "Anscombe", {"X": "X", "Y": "Y"}, by="Series"),
    _counts("airports.csv", "Airports", {"state": "State"}),
)
