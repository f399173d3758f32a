"""The report of a run as one HTML page."""

from __future__ import annotations

import json
from html import escape

from lightning_entrain.observe.charts import Line, bar_chart, line_chart, range_chart
from lightning_entrain.observe.page import page, section, table, tiles
from lightning_entrain.observe.rates import (
    RATE_TEXT,
    bubble_steps,
    mean_settled,
    measured_at,
    rate,
)
from lightning_entrain.observe.run_record import RunRecord
from lightning_entrain.observe.step_page import IDLE_PARTS, timeline_charts

OWN = "this run"
SAMPLER_ORDER = "sampler order, this run's schedule"
"""Row of the run's batches in sampler order under its own choice of schedule."""
_MODULE_NAMES = {"encoder": "encoder", "llm": "LLM"}


def run_page(record: RunRecord) -> str:
    """The report of one run."""
    parts = (_advice, _progress, _variability, _loads, _timeline, _policies, _rest)
    body = tiles(_headline(record)) + "".join(part(record) for part in parts)
    subtitle = f"{record.status}, {record.num_steps} steps (counted from 0 below, as in the logs)"
    if record.layout:
        subtitle += f"; {record.layout}"
    return page(_title(record), subtitle, body)


def _title(record: RunRecord) -> str:
    """Model, data and policy, if they are known, and the run's name."""
    model, data = (record.environment.get(key, "") for key in ("model", "data"))
    setting = f"{model} on {data}" if model and data else model or data
    policy = f"assignment {record.policy}" if record.policy and setting else ""
    parts = setting, policy, record.name
    return ", ".join(part for part in parts if part) or "Run"


def _headline(record: RunRecord) -> list[tuple[str, str]]:
    entries = []
    loss = record.last("train/loss")
    if loss is not None:
        entries.append((f"{loss:.4g}", "last training loss"))
    for module, name in _MODULE_NAMES.items():
        cv, fixed = (record.mean(f"variability/{part}{module}_cv") for part in ("", "fixed_"))
        if cv is not None:
            text = f"spread of {name} microbatches (std / mean)"
            if fixed is not None:
                text += f"; {fixed:.1%} in sampler order"
            entries.append((f"{cv:.1%}", text))
    bubble = mean_settled(record, "pipeline/bubble_ratio")
    if bubble is not None:
        at = measured_at(bubble_steps(record))
        entries.append((f"{bubble:.0%}", f"bubble: share of the ranks' time without compute; {at}"))
    gain = gain_over_fixed(record)
    if gain is not None:
        entries.append((f"{gain:+.0%}", f"steps per second, simulated: {gain_text(record)}"))
    tokens = rate(record, "throughput/tokens_per_sec")
    if tokens is not None:
        entries.append((f"{tokens:,.0f}", f"tokens per second: {RATE_TEXT}"))
    return entries


def gain_over_fixed(record: RunRecord) -> float | None:
    """Simulated speed of the run over that of policy `fixed` on the same batches, minus 1.

    0 for a run with policy `fixed`, which is compared with itself.
    """
    own, fixed = record.policies.get(OWN), record.policies.get("fixed")
    if own is None or fixed is None or own["step_ms"] <= 0:
        return None
    return float(fixed["step_ms"] / own["step_ms"] - 1)


def gain_text(record: RunRecord) -> str:
    """What the gain compares: policies, each with its schedule."""
    own = f"this run ({_with_schedule(record, OWN)})"
    if record.policy == "fixed":
        return f"{own} is sampler order itself"
    text = f"{own} against sampler order ({_with_schedule(record, 'fixed')})"
    parts = gain_parts(record)
    if parts is not None:
        text += f"; of which assignment {parts[0]:+.0%}, schedule {parts[1]:+.0%}"
    return text


def gain_parts(record: RunRecord) -> tuple[float, float] | None:
    """What assignment and schedule add: ``(1 + first) x (1 + second) = 1 + gain``.

    The assignment's part is against sampler order under the run's own choice of schedule.
    """
    rows = [record.policies.get(name) for name in (OWN, SAMPLER_ORDER, "fixed")]
    times = [row["step_ms"] for row in rows if row is not None and row["step_ms"] > 0]
    if len(times) < len(rows):
        return None
    own, between, fixed = times
    return between / own - 1, fixed / between - 1


def entrain_text(record: RunRecord) -> str:
    """Why policy ``entrain`` is slower than sampler order; empty where it is not."""
    entrain, fixed = record.policies.get("entrain"), record.policies.get("fixed")
    if entrain is None or fixed is None or entrain["step_ms"] <= fixed["step_ms"] * 1.001:
        return ""
    return (
        f"Policy entrain takes {entrain['step_ms'] / fixed['step_ms'] - 1:.0%} longer than sampler "
        "order here: gradients of deferred samples come back to the encoder a microbatch late, "
        "which with few microbatches costs more than even loads gain."
    )


def _with_schedule(record: RunRecord, name: str) -> str:
    policy = record.policy if name == OWN else name
    schedule = record.policies[name].get("schedule", "")
    return ", ".join(part for part in (policy, schedule) if part)


def _advice(record: RunRecord) -> str:
    if not record.advice:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in record.advice)
    return section("What would help", f'<ol class="advice">{items}</ol>')


def _progress(record: RunRecord) -> str:
    lines = [
        Line(name, record.series[key])
        for key, name in (("train/loss", "training"), ("val/loss", "validation"))
        if record.series.get(key)
    ]
    charts = line_chart("Loss", lines, unit="")
    rate = record.series.get("throughput/tokens_per_sec", [])
    charts += line_chart("Tokens per second", [Line("all ranks", rate)], unit="")
    return section("Progress", f'<div class="pair">{charts}</div>') if charts else ""


def _variability(record: RunRecord) -> str:
    charts = ""
    for module, name in _MODULE_NAMES.items():
        lines = [
            Line(label, record.series.get(f"variability/{part}{module}_cv", []))
            for label, part in (("this run", ""), ("fixed", "fixed_"))
        ]
        measured = record.series.get(f"variability/{module}_measured_cv", [])
        lines.append(Line("measured", measured, dots=True))
        lines = [line for line in lines if line.points]
        charts += line_chart(f"Spread of {name} microbatches", lines, unit="", percent=True)
    if not charts:
        return ""
    note = (
        "Standard deviation over mean of the microbatches' loads, as predicted for this run and "
        "for policy fixed (sampler order) on the same batches, and as measured."
    )
    return section("Variability", f'<div class="pair">{charts}</div>', note=note)


def _loads(record: RunRecord) -> str:
    timed = record.load_unit == "ms"
    what = ", forward and backward" if timed else ""
    charts = "".join(
        range_chart(f"{name} microbatches{what}", record.loads[module], unit=record.load_unit)
        for module, name in (("encoder", "Encoder"), ("llm", "LLM"))
        if record.loads.get(module)
    )
    if not charts:
        return ""
    note = "Load of each microbatch over the steps: range, middle half, median."
    if timed:
        note += (
            " Forward and backward through all stages of the module, by the cost model, whose "
            "milliseconds are nominal on a CPU: compare them with each other."
        )
    return section("Load per microbatch", f'<div class="pair">{charts}</div>', note=note)


def _timeline(record: RunRecord) -> str:
    if record.measured is None:
        return ""
    charts = timeline_charts(record.measured, record.simulated, record.rank_names)
    bars = [
        (name, [float(value) for value in values])
        for name, values in zip(record.rank_names, record.idle, strict=False)
    ]
    charts += bar_chart("Time of each rank", bars, IDLE_PARTS, unit="ms")
    note = (
        f"Step {record.timeline_step}, schedule {record.schedule}. Simulated time is stretched to "
        "the same compute time; gaps are idle."
    )
    return section("Timeline", charts, note=note)


def _policies(record: RunRecord) -> str:
    if not record.policies:
        return ""
    bars = [(name, [values["step_ms"]]) for name, values in record.policies.items()]
    rows = [
        (
            f"{name} ({record.policy})" if name == OWN and record.policy else name,
            values.get("schedule", ""),
            round(values["step_ms"], 3),
            f"{values['encoder_cv']:.1%}",
            f"{values['llm_cv']:.1%}",
        )
        for name, values in record.policies.items()
    ]
    body = bar_chart("Step of the slowest replica", bars, ["simulated"], unit="ms") + table(
        ["policy", "schedule", "step, ms", "encoder spread", "LLM spread"],
        rows,
        label="Policies compared",
    )
    note = (
        f"{record.num_compared} of the batches that were trained, on the same stages, by "
        "simulation with the cost model's times (nominal on a CPU: compare them with each other, "
        "not with measured ones): this run as it was, and each policy with the schedule it comes "
        "with. The run's own policy has the run's own schedule."
    )
    gain, parts = gain_over_fixed(record), gain_parts(record)
    if gain is not None and parts is not None:
        note += (
            f" Of the gain over fixed, {gain:+.1%}, the assignment is {parts[0]:+.1%} and the "
            f"schedule {parts[1]:+.1%}: they multiply."
        )
    note = f"{note} {entrain_text(record)}".strip()
    return section("What other policies would have cost", body, note=note)


def _rest(record: RunRecord) -> str:
    text = ""
    if record.memory_gib:
        bars = [
            (record.rank_names[r] if r < len(record.rank_names) else f"rank {r}", [peak])
            for r, peak in enumerate(record.memory_gib)
        ]
        body = bar_chart("Peak memory", bars, ["peak"], unit="GiB")
        if record.predicted_memory_gib:
            most = max(record.predicted_memory_gib)
            body += f"<p>The plan predicts {most:.3g} GiB for its largest stage.</p>"
        text += section("Memory", body)
    if record.plan:
        text += section("Plan", _plan_table(record))
    if record.environment:
        rows = sorted(record.environment.items())
        text += section("Environment", table(["what", "value"], rows, label="Environment"))
    return text


def _plan_table(record: RunRecord) -> str:
    plan = record.plan
    stages = [
        (
            stage["module"],
            f"{stage['start']}-{stage['stop'] - 1}",
            round(stage["forward_ms"], 3),
            round(stage["backward_ms"], 3),
            round(stage["state_gib"] + stage["activation_gib"] + stage["buffer_gib"], 4),
        )
        for stage in plan.get("stages", ())
    ]
    text = ""
    if stages:
        headings = ["module", "layers", "forward, ms", "backward, ms", "memory, GiB"]
        text = table(headings, stages, label="Stages of the plan")
    plain = [
        (key, json.dumps(value) if isinstance(value, (list, dict)) else value)
        for key, value in plan.items()
        if key != "stages" and value not in (None, "", [], {})
    ]
    return text + table(["field", "value"], plain, label="All fields of the plan", folded=True)
