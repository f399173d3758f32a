"""The metric's merge over updates, metrics and ranks equals numpy on the concatenation."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_entrain.observe.spread_metric import SpreadMetric, merge_spreads
from tests.distributed.ranks import run_ranks


def expected(loads):
    loads = np.asarray(loads, dtype=np.float64)
    mean, std = loads.mean(), loads.std()
    return {
        "mean": mean,
        "std": std,
        "cv": std / mean,
        "max_over_mean": loads.max() / mean,
        "min": loads.min(),
        "max": loads.max(),
    }


def found(metric):
    return {name: float(value) for name, value in metric.compute().items()}


def loads_of(rank):
    """Ranks 1 and 3 have none; rank 2's are far from the others'."""
    generator = np.random.default_rng(rank)
    if rank % 2:
        return np.zeros(0)
    return generator.gamma(2.0, 40.0, size=7 + rank) + 1000.0 * rank


def spread_over_ranks():
    import os

    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    metric = SpreadMetric()
    metric.update(loads_of(rank))
    alone = found(metric) if rank == 0 else None  # no other rank takes part in this
    metric.sync()
    together = found(metric)
    dist.destroy_process_group()
    return alone, together


def test_ranks_merge_to_numpy_also_with_empty_ranks():
    results = run_ranks(4, spread_over_ranks)
    whole = expected(np.concatenate([loads_of(rank) for rank in range(4)]))
    assert results[0][0] == pytest.approx(expected(loads_of(0)), rel=1e-12)
    for _, together in results:
        assert together == pytest.approx(whole, rel=1e-12)


def test_updates_and_merged_metrics_equal_numpy():
    parts = [loads_of(rank) for rank in (0, 1, 2, 4)]
    one, other = SpreadMetric(), SpreadMetric()
    for part in parts[:2]:
        one.update(part)
    for part in parts[2:]:
        other.update(torch.from_numpy(part))
    one.merge_state(other)
    assert found(one) == pytest.approx(expected(np.concatenate(parts)), rel=1e-12)
    one.reset()
    assert found(one) == dict.fromkeys(found(one), 0.0)


def test_nothing_merged_with_nothing_is_nothing():
    metric = SpreadMetric()
    metric.update([])
    assert found(metric) == dict.fromkeys(found(metric), 0.0)
    empty = metric.packed
    assert merge_spreads(torch.stack([empty, empty])).tolist() == empty.tolist()


def test_forward_gives_the_value_of_the_batch_and_keeps_all():
    metric = SpreadMetric()
    assert float(metric([1.0, 3.0])["mean"]) == 2.0
    assert float(metric([5.0])["mean"]) == 5.0
    assert float(metric.compute()["mean"]) == 3.0
