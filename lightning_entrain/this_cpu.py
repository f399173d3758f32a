"""The CPU this runs on, as a roofline."""

from __future__ import annotations

import os
import platform
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from lightning_entrain.workload.hardware import Device, cpu_device


def cpu_name() -> str:
    """``cpu`` with the processor's name, so that profiles of other machines are told apart."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"cpu ({name})"


@lru_cache(maxsize=1)
def this_cpu() -> Device:
    """Measure matrix speed and memory bandwidth with numpy; takes a fraction of a second."""
    side = 1024
    left = np.random.default_rng(0).random((side, side), dtype=np.float32)
    seconds = _fastest(lambda: left @ left)
    source = np.zeros(16 * 2**20, dtype=np.float32)
    target = np.empty_like(source)
    copy_seconds = _fastest(lambda: np.copyto(target, source))
    return cpu_device(
        name=cpu_name(),
        peak_tflops=2 * side**3 / seconds / 1e12,
        bandwidth_gbps=2 * source.nbytes / copy_seconds / 1e9,
        memory_gib=_memory_bytes() / 2**30,
    )


def _fastest(work: object, repetitions: int = 4) -> float:
    assert callable(work)
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _memory_bytes() -> float:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return 8.0 * 2**30
