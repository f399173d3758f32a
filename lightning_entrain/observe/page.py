"""The frame of the HTML pages: one file, no script, nothing loaded, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_entrain.observe.style import RUN_STYLE

GENERATOR = '<meta name="generator" content="lightning_entrain">'
"""In the head of every page, by which it is known again."""


@dataclass(frozen=True)
class Link:
    """A cell of a table that leads to another page."""

    text: str
    address: str


def document(title: str, style: str, body: str, *, head: str = "") -> str:
    """A whole page as one file.

    Args:
        title: Plain text.
        style: Its style sheet.
        body: HTML.
        head: More HTML for the head.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{GENERATOR}{head}<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"{body}</body></html>\n"
    )


def page(title: str, subtitle: str, body: str) -> str:
    """A whole page.

    Args:
        title: Plain text.
        subtitle: Plain text.
        body: HTML of the sections.
    """
    return document(
        title,
        RUN_STYLE,
        '<a class="skip" href="#main">Skip to the content</a>'
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        f'<main id="main">{body}</main>',
        # Without it a browser asks the server for one.
        head='<link rel="icon" href="data:,">',
    )


def section(title: str, body: str, *, note: str = "") -> str:
    """A titled part of a page; the note is plain text below the title."""
    text = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{body}</section>"


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Large numbers with what they mean."""
    cells = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(meaning)}</span></li>"
        for value, meaning in entries
    )
    return f'<ul class="tiles">{cells}</ul>'


def table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, label: str, folded: bool = False
) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        headings: Of the columns.
        rows: Numbers are set to the right.
        label: What the table holds, for screen readers.
        folded: Whether it is hidden until asked for.
    """
    numeric = [
        all(isinstance(row[i], (int, float)) for row in rows) if rows else False
        for i in range(len(headings))
    ]
    marks = [' class="n"' if right else "" for right in numeric]
    head = "".join(
        f'<th scope="col"{mark}>{escape(name)}</th>'
        for name, mark in zip(headings, marks, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{_cell(value)}</td>" for value, mark in zip(row, marks, strict=True))
        + "</tr>"
        for row in rows
    )
    text = scroll(
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", label=label
    )
    return f"<details><summary>{escape(label)}</summary>{text}</details>" if folded else text


def scroll(content: str, *, label: str) -> str:
    """A part that scrolls sideways, also by keyboard."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"{content}</div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, Link):
        return f'<a href="{escape(value.address)}">{escape(value.text)}</a>'
    return escape(_text(value))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
