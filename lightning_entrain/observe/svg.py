"""Small pieces of SVG, written by hand: no script, no font, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable


def number(value: float) -> str:
    """A coordinate with at most two decimals, as short as possible."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def tag(name: str, *children: str, **attributes: object) -> str:
    """One element; children are markup already.

    Args:
        name: Of the element.
        children: Markup between the tags.
        attributes: Values are escaped, numbers shortened. ``class_`` stands for ``class``, other
            underscores for hyphens.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        text = number(value) if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(text)}"')
    head = " ".join(parts)
    return f"<{head}>{''.join(children)}</{name}>" if children else f"<{head}/>"


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "t") -> str:
    """A line of text; its class sets size and colour."""
    return tag("text", html.escape(content), x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, *, class_: str) -> str:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def drawing(
    width: float, height: float, parts: Iterable[str], *, title: str, description: str, key: str
) -> str:
    """A whole picture that scales with its container and is read out by its title.

    Args:
        width: In its own units.
        height: In its own units.
        parts: Markup.
        title: What it shows, short.
        description: What is to be seen in it.
        key: Unique on the page.
    """
    return tag(
        "svg",
        tag("title", html.escape(title), id=f"{key}-t"),
        tag("desc", html.escape(description), id=f"{key}-d"),
        *parts,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{key}-t {key}-d",
        xmlns="http://www.w3.org/2000/svg",
    )


def labelled(
    label: str, width: float, height: float, *parts: str, class_: str | None = None
) -> str:
    """A whole picture that is read out by one line; for charts whose numbers stand in a table."""
    return tag(
        "svg",
        *parts,
        class_=class_,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=label,
    )


def ticks(largest: float, num: int = 5) -> list[float]:
    """Round numbers from 0 to at most ``largest``, about ``num`` steps."""
    if not largest > 0:
        return [0.0]
    step = _round_step(largest / num)
    return [step * i for i in range(int(largest / step * (1 + 1e-9)) + 1)]


def covering_ticks(low: float, high: float, num: int = 4) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, about ``num`` steps."""
    if high <= low:
        high = low + 1.0
    step = _round_step((high - low) / num)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _round_step(least: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= least * (1 - 1e-9))


def tick_label(value: float, largest: float) -> str:
    """As many decimals as the scale needs."""
    if largest >= 10:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{value:.3g}"
