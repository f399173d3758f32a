"""Schedules are made every step: they must cost little."""

import time

import numpy as np

from lightning_entrain.schedule.lower import lower
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import Placement
from lightning_entrain.schedule.verify import verify
from lightning_entrain.schedule.zero_bubble import build_zero_bubble

from .helpers import full_rows


def least_seconds(function, repeats=3):
    """Of a few tries, so that other work on the machine does not count."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_building_and_verifying_16_stages_of_64_microbatches_takes_under_a_second():
    placement, rows = Placement.one_per_rank(8, 8), full_rows(64)
    ones = np.ones((16, 64))
    costs = StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)

    def prepare(build):
        program = lower(build(), rows, boundary_columns=(8,) * 15, dtype="bfloat16")
        verify(program, rows, max_live=16)

    assert least_seconds(lambda: prepare(lambda: build_1f1b(placement, rows))) < 1
    assert least_seconds(lambda: prepare(lambda: build_zero_bubble(placement, rows, costs))) < 1


def test_simulating_4_replicas_of_8_stages_and_32_microbatches_takes_under_50_ms():
    placement, rows = Placement.one_per_rank(5, 3), full_rows(32)
    ones = np.ones((8, 32))
    costs = StepCosts(forward_ms=ones, input_ms=ones, weight_ms=ones)
    schedule = build_zero_bubble(placement, rows, costs)
    simulate(schedule, costs, rows)  # compiles

    def run():
        for _ in range(4):
            assert simulate(schedule, costs, rows).timeline.rows

    assert least_seconds(run) < 0.05
