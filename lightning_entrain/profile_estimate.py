"""How long `entrain-profile` will take, told before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_entrain.workload.hardware import Device
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.roofline import AnalyticCostModel
from lightning_entrain.workload.shapes import Load, ModelShape, ModuleShape
from lightning_entrain.workload.tables import SizeTable

SIZES = (64, 256, 1024, 4096, 16384)
CPU_SIZES = (64, 256, 1024, 2048)
"""Rows per call; a CPU takes minutes for more, and its microbatches are smaller."""

REPEATED_BLOCKS = 4
"""Equal blocks timed as one stage; what a stage does once is shared by them as in training."""

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 50


def counts_of(rows: int) -> tuple[int, ...]:
    """Sequences that so many rows are timed as."""
    return (1, 4) if rows >= 64 else (1,)


def num_points(shape: ModelShape, sizes: Sequence[int]) -> int:
    """Timings of a profile: every distinct layer at every size."""
    layers = sum(len(list(_timed(module))) for module in shape.modules)
    return layers * sum(len(counts_of(rows)) for rows in sizes)


def estimated_seconds(
    shape: ModelShape, device: Device, sizes: Sequence[int], seconds_per_point: float
) -> float:
    """About how long timing takes, by the analytic cost model.

    Args:
        shape: The model.
        device: The device, as a roofline.
        sizes: Rows per call.
        seconds_per_point: Time to spend on each timing, unless a few repetitions take longer.
    """
    model = AnalyticCostModel(device=device, link_gbps=device.link_gbps)
    training = Training(precision="32-true")
    total = 0.0
    for module in shape.modules:
        for layer, times in _timed(module):
            for rows in sizes:
                for count in counts_of(rows):
                    load = _load(module, rows, count)
                    cost = model.layer_times(module.name, layer, load, training)
                    once = float(cost.total_ms.sum()) / 1e3 * times
                    spent = max(seconds_per_point, LEAST_REPETITIONS * once)
                    total += once + min(spent, MOST_REPETITIONS * once)
    return total


def duration_text(seconds: float) -> str:
    """A rough duration in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"


def _timed(module: ModuleShape) -> Iterator[tuple[Layer, int]]:
    """Layers that are timed, and how many of them one call runs."""
    yield module.prologue[0], 1
    for layer in dict.fromkeys(module.blocks):
        yield layer, REPEATED_BLOCKS
    yield module.epilogue[0], 1


def _load(module: ModuleShape, rows: int, count: int) -> Load:
    zeros = [0] * count
    if module.name == "encoder":
        side = max(2, 2 * round((rows / count) ** 0.5 / 2))
        table = SizeTable.from_single_images([side] * count, [side] * count, zeros)
    else:
        table = SizeTable.from_single_images(zeros, zeros, [max(1, rows // count)] * count)
    return module.load(table)
