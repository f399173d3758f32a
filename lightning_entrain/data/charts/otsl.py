"""Tables as OTSL text, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_entrain.errors import SampleError

_TOKEN = re.compile(r"<(ched|rhed|fcel|ecel|nl)>([^<]*)")


def table_to_otsl(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table as OTSL.

    Args:
        header: Column headers; the first stands above the row headers.
        rows: Per row its row header and its cells. An empty string is an empty cell.

    Returns:
        ``<otsl>``, per row its cells (``<ched>`` column header, ``<rhed>`` row header, ``<fcel>``
        filled cell, ``<ecel>`` empty cell) and ``<nl>``, then ``</otsl>``.
    """
    lines = ["".join(_cell("ched", text) for text in header)]
    for label, *cells in rows:
        lines.append(_cell("rhed", label) + "".join(_cell("fcel", text) for text in cells))
    return "<otsl>" + "".join(f"{line}<nl>" for line in lines) + "</otsl>"


def otsl_to_table(text: str) -> list[list[str]]:
    """Read OTSL text as rows of cells; the first row is the header.

    Raises:
        SampleError: If the text is not an OTSL table.
    """
    text = text.strip()
    if not (text.startswith("<otsl>") and text.endswith("<nl></otsl>")):
        raise SampleError(f"{text[:40]!r} is not an OTSL table", limit="<otsl>...<nl></otsl>")
    rows: list[list[str]] = [[]]
    for tag, content in _TOKEN.findall(text):
        if tag == "nl":
            rows.append([])
        else:
            rows[-1].append(content)
    return rows[:-1]


def _cell(tag: str, text: str) -> str:
    text = text.replace("<", "(").replace(">", ")")
    return f"<{tag}>{text}" if text else "<ecel>"
