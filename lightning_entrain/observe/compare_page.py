"""Several runs side by side as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_entrain.observe.charts import Line, line_chart
from lightning_entrain.observe.page import Link, page, section, table
from lightning_entrain.observe.rates import (
    RATE_TEXT,
    bubble_steps,
    mean_settled,
    rate,
    step_ms,
)
from lightning_entrain.observe.run_page import OWN, gain_over_fixed
from lightning_entrain.observe.run_record import RunRecord

_TEXTS: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("policy", lambda r: r.policy),
    ("schedule", lambda r: str(r.policies.get(OWN, {}).get("schedule", "")) or r.schedule),
    ("stages", lambda r: stages_text(r)),
    ("processes", lambda r: r.environment.get("processes", "")),
)
_NUMBERS: tuple[tuple[str, Callable[[RunRecord], float | None], str], ...] = (
    ("last training loss", lambda r: r.last("train/loss"), ".4g"),
    ("last validation loss", lambda r: r.last("val/loss"), ".4g"),
    ("encoder spread", lambda r: r.mean("variability/encoder_cv"), ".1%"),
    ("LLM spread", lambda r: r.mean("variability/llm_cv"), ".1%"),
    ("bubble", lambda r: mean_settled(r, "pipeline/bubble_ratio"), ".0%"),
    ("step, ms", step_ms, ",.4g"),
    ("tokens/s", lambda r: rate(r, "throughput/tokens_per_sec"), ",.0f"),
    ("gain, simulated", gain_over_fixed, "+.0%"),
)


def compare_page(records: Sequence[RunRecord], addresses: Sequence[str] = ()) -> str:
    """Several runs side by side; the first three have lines.

    Args:
        records: The runs.
        addresses: Where each run's own report is, as seen from the page; empty where there is none.
    """
    names = distinct_names(records)
    addresses = [*addresses, *[""] * (len(records) - len(addresses))]
    columns = [*_TEXTS, *((name, _formatted(value, form)) for name, value, form in _NUMBERS)]
    known = [(name, text) for name, text in columns if any(text(record) for record in records)]
    rows = [
        (Link(name, address) if address else name, *(text(record) for _, text in known))
        for name, address, record in zip(names, addresses, records, strict=True)
    ]
    body = section(
        "Runs",
        table(["run", *(name for name, _ in known)], rows, label="Runs compared"),
        note=_note(records, names),
    )
    charts = ""
    for title, key, percent in (
        ("Training loss", "train/loss", False),
        ("Spread of encoder microbatches", "variability/encoder_cv", True),
        ("Spread of LLM microbatches", "variability/llm_cv", True),
        ("Bubble", "pipeline/bubble_ratio", True),
        ("Tokens per second", "throughput/tokens_per_sec", False),
    ):
        lines = [
            Line(name, record.series.get(key, []))
            for name, record in zip(names[:3], records[:3], strict=True)
        ]
        charts += line_chart(title, lines, unit="", percent=percent)
    body += section("Over the steps", f'<div class="pair">{charts}</div>')
    return page("Runs compared", ", ".join(names), body)


def _formatted(
    value_of: Callable[[RunRecord], float | None], form: str
) -> Callable[[RunRecord], str]:
    def text(record: RunRecord) -> str:
        value = value_of(record)
        return "" if value is None else format(value, form)

    return text


def _note(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    note = (
        f"Tokens per second and time per step: {RATE_TEXT}, waits for data included. Spread: mean "
        "over all steps. Gain: simulated speed over sampler order on the run's own batches. Steps "
        "are counted from 0, as in the logged files."
    )
    looks = [
        f"{name} {', '.join(map(str, steps)) if len(steps) <= 4 else f'{len(steps)} steps'}"
        for name, steps in zip(names, map(bubble_steps, records), strict=True)
        if steps
    ]
    if looks:
        note += f" Bubble: mean of the steps where it was measured: {'; '.join(looks)}."
    return note


def stages_text(record: RunRecord) -> str:
    """Encoder and LLM stages of a replica; empty where they are unknown."""
    encoder, llm = (record.plan.get(f"{module}_layers", ()) for module in ("encoder", "llm"))
    if not encoder or not llm:
        return ""
    replicas = int(record.plan.get("dp", 1))
    many = f"{replicas} replicas of " if replicas > 1 else ""
    return f"{many}{len(encoder)} encoder + {len(llm)} LLM"


def distinct_names(records: Sequence[RunRecord]) -> list[str]:
    """Names of runs; equal ones are numbered."""
    names: list[str] = []
    for record in records:
        name, number = record.name or "run", 2
        while name in names:
            name, number = f"{record.name or 'run'} ({number})", number + 1
        names.append(name)
    return names
