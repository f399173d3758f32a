"""What a run's rates and idle time were, defined once for the terminal, report and comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_entrain.observe.run_record import RunRecord, Series

WARM_UP_STEPS = 2
"""Steps at the start of a run that rates and idle time leave out, where there are others."""

RATE_TEXT = f"all steps but the first {WARM_UP_STEPS}, samples or tokens over time"
"""How rates are taken, in words."""


def settled(points: Series) -> Series:
    """The values after warm-up; all of them where there are no others."""
    return [point for point in points if point[0] >= WARM_UP_STEPS] or list(points)


def mean_settled(record: RunRecord, key: str) -> float | None:
    """Mean of a series' finite values after warm-up."""
    values = [value for _, value in settled(record.series.get(key, [])) if math.isfinite(value)]
    return math.fsum(values) / len(values) if values else None


def rate(record: RunRecord, key: str) -> float | None:
    """What was trained after warm-up over the time that it took, waits for data included.

    Logged rates are per window of equally many steps, so each counts by its window's time.

    Args:
        record: A run.
        key: Such as ``throughput/tokens_per_sec``.
    """
    seconds = dict(_window_seconds(record))
    points = [
        (seconds.get(step, 0.0), value)
        for step, value in settled(record.series.get(key, []))
        if math.isfinite(value)
    ]
    total = math.fsum(weight for weight, _ in points)
    if total <= 0:
        return math.fsum(value for _, value in points) / len(points) if points else None
    return math.fsum(weight * value for weight, value in points) / total


def step_ms(record: RunRecord) -> float | None:
    """Mean time of a step after warm-up, wait for its data included, in milliseconds."""
    seconds = [value for _, value in settled(_window_seconds(record))]
    return 1e3 * math.fsum(seconds) / len(seconds) if seconds else None


def measured_at(steps: Sequence[int]) -> str:
    """At which steps something was measured, in words; steps as logged, from 0."""
    if len(steps) == 1:
        return f"measured at step {steps[0]}"
    if len(steps) <= 4:
        return f"mean of steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    return f"mean of {len(steps)} steps from {steps[0]} to {steps[-1]}"


def bubble_steps(record: RunRecord) -> list[int]:
    """The steps whose bubble :func:`mean_settled` averages."""
    return [step for step, _ in settled(record.series.get("pipeline/bubble_ratio", []))]


def _window_seconds(record: RunRecord) -> Series:
    """Per window the time of one of its steps: compute and wait for data."""
    waits = dict(record.series.get("throughput/data_wait_share", []))
    return [
        (step, value / max(1 - waits.get(step, 0.0), 1e-9))
        for step, value in record.series.get("throughput/step_seconds", [])
        if math.isfinite(value)
    ]
