"""One sample of the chart corpus, from its seed and index alone."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass

from lightning_entrain.data.charts.otsl import table_to_otsl
from lightning_entrain.data.charts.tables import draw_table
from lightning_entrain.errors import ConfigError

GENERATOR_VERSION = 1
"""Raised whenever the same seed draws something else."""

_PROMPTS = (
    "Convert this chart to OTSL.",
    "Write the table behind this chart as OTSL.",
    "Which numbers does this chart show? Answer in OTSL.",
)
_TEXT_PROMPT = "Write this table as OTSL.\n"


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """What the corpus looks like.

    Attributes:
        seed: Same seed, same charts.
        min_side: Longer side of the smallest charts, in pixels.
        max_side: Longer side of the largest charts, in pixels.
        text_only_fraction: Share of samples that give the table as text instead of a chart.
    """

    seed: int = 0
    min_side: int = 60
    max_side: int = 3000
    text_only_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 32 <= self.min_side <= self.max_side <= 8000:
            raise ConfigError(
                f"min_side is {self.min_side}, max_side {self.max_side}",
                limit="32 <= min_side <= max_side <= 8000 pixels",
            )
        if not 0 <= self.text_only_fraction <= 1:
            raise ConfigError(f"text_only_fraction is {self.text_only_fraction}", limit="0 to 1")

    def fingerprint(self) -> str:
        """Text that changes when an option does."""
        return ",".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))


@dataclass(frozen=True, kw_only=True)
class ChartSample:
    """A chart and its table.

    Attributes:
        user: What is asked.
        assistant: The table as OTSL.
        image: A PNG file, or None for a text-only sample.
    """

    user: str
    assistant: str
    image: bytes | None


def make_sample(options: ChartOptions, index: int) -> ChartSample:
    """Make sample ``index``. It does not depend on any other, nor on the process that makes it."""
    state = random.Random(f"chart:{GENERATOR_VERSION}:{options.seed}:{index}")
    width, height = _size(options, index, state)
    max_rows = max(3, round(math.sqrt(width * height) / 60))
    table = draw_table(state, min(max_rows, 24))
    assistant = table_to_otsl(table.header, table.rows)
    if _is_text_only(options, index):
        lines = [", ".join(row) for row in (table.header, *table.rows)]
        return ChartSample(user=_TEXT_PROMPT + "\n".join(lines), assistant=assistant, image=None)
    # Matplotlib takes a second to import; readers of text-only corpora do without.
    from lightning_entrain.data.charts.draw import draw_chart

    prompt = state.choice(_PROMPTS)
    kind = state.choice(table.kinds)
    image = draw_chart(table, kind, width, height, state)
    return ChartSample(user=prompt, assistant=assistant, image=image)


def _size(options: ChartOptions, index: int, state: random.Random) -> tuple[int, int]:
    """Longer sides are spread evenly over orders of magnitude; both extremes occur for sure."""
    low, high = math.log(options.min_side), math.log(options.max_side)
    longer = math.exp(state.uniform(low, high))
    if index % 64 == 0:
        longer = options.max_side
    elif index % 64 == 1:
        longer = options.min_side
    shorter = max(options.min_side * 0.7, longer * state.uniform(0.45, 1.0))
    sides = (round(longer), round(min(shorter, longer)))
    return sides if state.random() < 0.75 else (sides[1], sides[0])


def _is_text_only(options: ChartOptions, index: int) -> bool:
    fraction = options.text_only_fraction
    return int((index + 1) * fraction) > int(index * fraction)
