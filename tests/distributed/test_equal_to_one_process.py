"""Every layout trains as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.job import Job, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks

LAYOUTS = [
    pytest.param(2, {}, id="1+1"),
    pytest.param(3, {"llm_stages": 2}, id="1+2"),
    pytest.param(3, {"encoder_stages": 2}, id="2+1"),
    pytest.param(4, {"encoder_stages": 2, "llm_stages": 2}, id="2+2"),
    pytest.param(4, {"replicas": 2}, id="2x(1+1)"),
    pytest.param(2, {"replicas": 2, "encoder_stages": 1, "llm_stages": 2}, id="2x(colocated 1+2)"),
]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (scale or 1.0)


def assert_equal(
    ranks: list[Outcome], one: Outcome, *, parameters: float, gradients: float
) -> None:
    seen: set[str] = set()
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, one.losses, rtol=1e-5)
        assert rank.correct == one.correct
        for name, gradient in rank.first_gradients.items():
            assert relative(gradient, one.first_gradients[name]) < gradients, name
        for name, parameter in rank.parameters.items():
            assert relative(parameter, one.parameters[name]) < parameters, name
        seen |= set(rank.first_gradients)
    assert seen == set(one.first_gradients)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for optimizer in ("adamw", "sgd"):
        root = tmp_path_factory.mktemp("one")
        found[optimizer] = Job(optimizer=optimizer).fit(None, 1, root).to_numpy()
    return found


@pytest.mark.parametrize(("devices", "options"), LAYOUTS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_layout(
    devices: int,
    options: dict[str, Any],
    optimizer: str,
    references: dict[str, Outcome],
    tmp_path: Path,
) -> None:
    job = Job(optimizer=optimizer)
    ranks = run_ranks(devices, fit_on_rank, job, options, devices, tmp_path)
    bound = 1e-4 if optimizer == "adamw" else 1e-5
    assert_equal(ranks, references[optimizer], parameters=bound, gradients=1e-6)


VARIANTS = [
    pytest.param(Job(trainer={"gradient_clip_val": 0.05}), id="clipping"),
    pytest.param(Job(trainer={"accumulate_grad_batches": 3}), id="accumulation"),
    pytest.param(Job(loss_scale=0.25), id="scaled loss"),
    pytest.param(Job(text_only=1.0, num_batches=4), id="text only"),
    pytest.param(Job(batch_size=2, num_microbatches=5, num_batches=4), id="empty microbatches"),
    pytest.param(Job(num_microbatches=1, num_batches=4), id="one microbatch"),
    pytest.param(Job(text_only=0.0, max_side=600, num_batches=3), id="very different sizes"),
    pytest.param(Job(validate=True, num_batches=4), id="validation"),
]


@pytest.mark.parametrize("job", VARIANTS)
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(3, {"llm_stages": 2}, id="1+2"),
        pytest.param(4, {"replicas": 2}, id="2x(1+1)"),
    ],
)
def test_variant(job: Job, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    one = job.fit(None, 1, tmp_path).to_numpy()
    ranks = run_ranks(devices, fit_on_rank, job, options, devices, tmp_path)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)
    for rank in ranks:
        np.testing.assert_allclose(rank.val_losses, one.val_losses, rtol=1e-5)
        assert rank.metrics == pytest.approx(one.metrics, rel=1e-5)
        assert rank.metrics == ranks[0].metrics


def test_one_process_with_the_strategy_runs_all_stages(tmp_path: Path) -> None:
    job = Job(num_batches=4, validate=True)
    one = job.fit(None, 1, tmp_path).to_numpy()
    colocated = fit_on_rank(job, {"encoder_stages": 2, "llm_stages": 3}, 1, tmp_path)
    assert_equal([colocated], one, parameters=1e-5, gradients=1e-6)
