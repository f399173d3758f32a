"""The frame of the HTML pages: one file, no script, nothing loaded, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#5a626c;
--line:#d9dde2;
--grid:#e9ecef;--one:#1f66b5;--two:#b45309;--three:#0f766e;--four:#7c3aed;--wait:#c3c9d1;
--bad:#b42318;--good:#157347;--on:#fff}
@media (prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--ink:#e8eaed;--soft:#a6aeb8;
--line:#353b42;--grid:#2a2f35;--one:#6cacf0;--two:#f0a24c;--three:#4cc3b3;--four:#b794f6;
--wait:#4a525c;--bad:#ff8a7a;--good:#6fcf97;--on:#10141a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,sans-serif}
main,header{max-width:68rem;margin:0 auto;padding:1rem 1.25rem}
h1{font-size:1.6rem;line-height:1.2;margin:.6rem 0 .2rem}
h2{font-size:1.15rem;margin:0 0 .5rem}
p{margin:.3rem 0 .7rem;max-width:46rem}
.soft{color:var(--soft)}
a{color:var(--one)}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem 1rem;z-index:1}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:1rem 1.1rem;margin:0 0 1rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;
margin:0 0 1rem;padding:0;list-style:none}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:.6rem .8rem}
.tiles b{display:block;font-size:1.45rem;line-height:1.3;font-weight:600}
.tiles span{color:var(--soft);font-size:.88rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.2rem}
.advice{padding-left:1.2rem;margin:.2rem 0}
.advice li{margin:0 0 .6rem;max-width:48rem}
figure{margin:0 0 .6rem}
figcaption{font-weight:600;margin:0 0 .2rem}
.scroll{overflow-x:auto}
:focus-visible{outline:3px solid var(--one);outline-offset:2px}
svg{display:block;width:100%;max-width:38rem;height:auto}
svg.wide{min-width:40rem;max-width:none}
svg text{fill:var(--ink);font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg .tick{fill:var(--soft);font-size:12px}
.axis{stroke:var(--line);stroke-width:1}
.grid{stroke:var(--grid);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.s1{stroke:var(--one)}.s2{stroke:var(--two);stroke-dasharray:6 4}
.s3{stroke:var(--three);stroke-dasharray:2 3}
.f1{fill:var(--one)}.f2{fill:var(--two)}.f3{fill:var(--three)}.f4{fill:var(--four)}
.fw{fill:var(--wait)}
.median{fill:none;stroke:var(--on);stroke-width:2}
.key{display:inline-flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.1rem 0 .4rem;padding:0;
list-style:none;font-size:.9rem;color:var(--soft)}
.key li{overflow-wrap:anywhere;min-width:0}
.pair>*{min-width:0}
.key svg{display:inline-block;width:1.4rem;height:.8rem;margin-right:.35rem;vertical-align:-1px}
table{border-collapse:collapse;font-size:.92rem}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--grid);
vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
summary{cursor:pointer;color:var(--soft);font-size:.92rem}
code{font-family:ui-monospace,Consolas,monospace;font-size:.92em;overflow-wrap:anywhere}
@media (max-width:40rem){svg text{font-size:16px}svg .tick{font-size:15px}}
@media print{section{break-inside:avoid}details{display:none}}
"""


def page(title: str, subtitle: str, body: str) -> str:
    """A whole page.

    Args:
        title: Plain text.
        subtitle: Plain text.
        body: HTML of the sections.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Without it a browser asks the server for one.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#main">Skip to the content</a>'
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        f'<main id="main">{body}</main></body></html>\n'
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
        + "".join(
            f"<td{mark}>{escape(_text(value))}</td>" for value, mark in zip(row, marks, strict=True)
        )
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


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
