"""The report of a comparison: one page, readable without network, in light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_entrain.observe.page import document, scroll
from lightning_entrain.observe.style import SIMULATION_STYLE
from lightning_entrain.observe.svg_figures import (
    IterationBar,
    iteration_figure,
    spread_figure,
    timeline_figure,
)

if TYPE_CHECKING:
    from lightning_entrain.simulation.results import PolicyResult
    from lightning_entrain.simulation.setting import Comparison

_SPEED = (
    "Policy",
    "Schedule",
    "Stages",
    "K",
    "Iteration, ms",
    "Speed-up",
    "/ ideal",
    "/ bottleneck",
    "/ bound",
    "Bubble, %",
    "Planning, ms",
)
_SPREAD = (
    "Policy",
    "Encoder std, ms",
    "CV, %",
    "LLM std, ms",
    "CV, %",
    "In flight, per stage",
    "Memory, GiB",
)
_LEGEND = (
    ("ef", "encoder forward"),
    ("eb", "encoder backward (B or I)"),
    ("ew", "encoder weight gradient (W)"),
    ("lf", "LLM forward"),
    ("lb", "LLM backward (B or I)"),
    ("lw", "LLM weight gradient (W)"),
    ("idle", "idle"),
)


def report_page(found: Comparison) -> str:
    """The whole page as HTML; no script, no font, no address is loaded.

    Args:
        found: What was simulated.
    """
    from lightning_entrain.simulate_report import setting_lines

    title = f"{found.setting.request.model.name} on {found.described['data']}"
    sections = [_section(found, index) for index in range(len(found.names))]
    body = [
        "<main>",
        "<header><p class='kicker'>entrain-simulate</p>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p class='setting'>{html.escape(line)}.</p>" for line in setting_lines(found)[1:]),
        f"<p class='setting'>{_batches(found)}</p>",
        "</header>",
        _overview(found),
        _tables(found),
        *(f"<p class='warning'>{html.escape(text)}.</p>" for text in found.warnings),
        "<section aria-labelledby='timelines'><h2 id='timelines'>Timelines and microbatches</h2>",
        "<p>The slowest replica of the first batch. All pictures of a kind share one scale; point "
        "at a box for its action and times. An action is named stage, kind, microbatch: 3F2.</p>",
        _legend(),
        *sections,
        "</section>",
        _notes(),
        "</main>",
    ]
    return document(title, SIMULATION_STYLE, "\n".join(body))


def _batches(found: Comparison) -> str:
    setting = found.setting
    size = setting.parallel_plan.global_batch_size
    return (
        f"Means over {setting.num_batches} global batch(es) of {size:,} samples, drawn with seed "
        f"{setting.seed}."
    )


def _overview(found: Comparison) -> str:
    bars = [
        IterationBar(
            name=name,
            iteration_ms=result.iteration_ms,
            ideal_ms=result.ideal_ms,
            bottleneck_ms=result.bottleneck_ms,
            speedup=found.speedup(index),
        )
        for index, (name, result) in enumerate(zip(found.names, found.results, strict=True))
    ]
    base = html.escape(found.names[found.baseline])
    picture = iteration_figure(bars, title="Iteration time per policy", key="iterations")
    return (
        "<section aria-labelledby='overview'><h2 id='overview'>Iteration time</h2>"
        f"<figure class='narrow'>{picture}<figcaption>Mean of the slowest replica, and "
        f"throughput over {base}. Dotted mark: ideal, all work spread evenly over all ranks. "
        "Solid mark: bottleneck, the work of the busiest rank under the plan.</figcaption></figure>"
        "</section>"
    )


def _tables(found: Comparison) -> str:
    speed = [_speed_cells(found, index, own) for index, own in enumerate(found.results)]
    spread = [_spread_cells(own) for own in found.results]
    return (
        "<section aria-labelledby='table'><h2 id='table'>All figures</h2>"
        f"{_table(found, _SPEED, speed, 'Speed')}"
        f"{_table(found, _SPREAD, spread, 'Forward time per microbatch, and memory')}</section>"
    )


def _table(
    found: Comparison, columns: Sequence[str], cells: Sequence[Sequence[str]], caption: str
) -> str:
    fastest = min(result.iteration_ms for result in found.results)
    rows = []
    for name, result, own in zip(found.names, found.results, cells, strict=True):
        data = _join(f"<td>{html.escape(cell)}</td>" for cell in own)
        mark = " class='best'" if result.iteration_ms == fastest else ""
        rows.append(f"<tr{mark}><th scope='row'>{html.escape(name)}</th>{data}</tr>")
    head = _join(f"<th scope='col'>{html.escape(column)}</th>" for column in columns)
    return scroll(
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{_join(rows)}</tbody></table>",
        label=caption,
    )


def _speed_cells(found: Comparison, index: int, result: PolicyResult) -> list[str]:
    bound = result.iteration_ms / result.bound_ms if result.bound_ms else 1.0
    return [
        result.schedule,
        result.plan.splits,
        result.counts_text,
        f"{result.iteration_ms:,.1f}",
        f"{found.speedup(index):.2f}",
        f"{result.over_ideal:.3f}",
        f"{result.over_bottleneck:.3f}",
        f"{bound:.3f}",
        f"{100 * result.bubble_ratio:.1f}",
        f"{result.planning_ms:.0f}",
    ]


def _spread_cells(result: PolicyResult) -> list[str]:
    return [
        f"{result.encoder.std:.2f}",
        f"{100 * result.encoder.cv:.1f}",
        f"{result.llm.std:.2f}",
        f"{100 * result.llm.cv:.1f}",
        " ".join(map(str, result.peak_live)),
        f"{max(result.peak_gib):.0f}",
    ]


def _legend() -> str:
    items = "".join(
        f"<li><svg viewBox='0 0 14 14' aria-hidden='true'><rect class='{kind}' width='14' "
        f"height='14' rx='2'/></svg>{name}</li>"
        for kind, name in _LEGEND
    )
    return f"<ul class='legend' aria-label='Colours'>{items}</ul>"


def _section(found: Comparison, index: int) -> str:
    name, result = found.names[index], found.results[index]
    timeline = result.timelines[result.slowest]
    scale = max(own.timelines[own.slowest].iteration_ms for own in found.results)
    picture = timeline_figure(
        timeline,
        num_encoder_stages=len(result.plan.encoder_layers),
        scale_ms=scale,
        title=f"Timeline of {name} under {result.schedule}",
        key=f"timeline-{index}",
    )
    safe = html.escape(name)
    return (
        f"<article aria-labelledby='policy-{index}'><h3 id='policy-{index}'>{safe}</h3>"
        f"<p>{html.escape(_sentence(found, index))}</p>"
        f"<figure class='wide'>{scroll(picture, label=f'Timeline of {name}')}</figure>"
        f"<div class='pair'>{_spread(found, index, 'encoder')}{_spread(found, index, 'llm')}</div>"
        f"{_times_table(name, result)}</article>"
    )


def _sentence(found: Comparison, index: int) -> str:
    result = found.results[index]
    return (
        f"{result.schedule}, {result.plan.splits} encoder:LLM stages on "
        f"{result.plan.placement.num_ranks} ranks, {result.plan.name.replace('_', ' ')}: "
        f"{result.iteration_ms:,.1f} ms, {found.speedup(index):.2f} x "
        f"{found.names[found.baseline]}, {100 * result.bubble_ratio:.1f} % idle."
    )


def _spread(found: Comparison, index: int, module: str) -> str:
    result = found.results[index]
    spread = result.encoder if module == "encoder" else result.llm
    label = "Encoder" if module == "encoder" else "LLM"
    scale = max(max(_times(own, module), default=0.0) for own in found.results)
    picture = spread_figure(
        _times(result, module),
        module=module,
        scale_ms=scale,
        title=f"Forward time per {label} microbatch of {found.names[index]}",
        key=f"spread-{index}-{module}",
    )
    return (
        f"<figure>{picture}<figcaption>{label} forward per microbatch, ms; over all batches std "
        f"{spread.std:.2f} ms, CV {100 * spread.cv:.1f}&nbsp;%</figcaption></figure>"
    )


def _times(result: PolicyResult, module: str) -> Sequence[float]:
    times = result.forward_times
    return times.encoder_ms if module == "encoder" else times.llm_ms


def _times_table(name: str, result: PolicyResult) -> str:
    parts = []
    for label, module in (("Encoder", "encoder"), ("LLM", "llm")):
        cells = _join(f"<td>{value:.2f}</td>" for value in _times(result, module))
        parts.append(f"<tr><th scope='row'>{label}</th>{cells}</tr>")
    rows = scroll(
        f"<table class='times'><tbody>{_join(parts)}</tbody></table>",
        label=f"Forward times of {name}",
    )
    return f"<details><summary>Forward ms per microbatch as a table</summary>{rows}</details>"


def _join(parts: Iterable[str]) -> str:
    return "".join(parts)


def _notes() -> str:
    return (
        "<section aria-labelledby='notes'><h2 id='notes'>How to read it</h2><ul>"
        "<li>Ideal: forward and backward of the batch spread evenly over all ranks of all "
        "replicas. Bottleneck: work of the busiest rank. Bound: the largest over ranks of the "
        "fill before it, its work and the drain after it; where weight gradients can be held back "
        "they fill the drain, which then counts for nothing.</li>"
        "<li>In flight: microbatches with F begun and W (or B) not ended, the most per stage. "
        "Memory: weights, gradients, optimizer states and activations of the fullest GPU.</li>"
        "<li>std and CV: of the forward time of all microbatches of all replicas. With a ramp the "
        "first microbatches are light on purpose, so the spread is large and the step short.</li>"
        "<li>Planning: assignment and the schedule of one replica, on this machine.</li>"
        "</ul></section>"
    )
