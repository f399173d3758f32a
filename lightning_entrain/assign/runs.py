"""Consecutive runs of near-equal length."""

from __future__ import annotations

from itertools import pairwise


def even_runs(start: int, stop: int, num_runs: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into consecutive runs whose lengths differ by at most one."""
    length, num_longer = divmod(stop - start, num_runs)
    bounds = [start]
    for run in range(num_runs):
        bounds.append(bounds[-1] + length + (run < num_longer))
    return list(pairwise(bounds))
