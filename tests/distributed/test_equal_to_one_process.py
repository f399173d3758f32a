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


def assert_equal(ranks: list[Outcome], one: Outcome, *, parameters: float, gradients: float) -> None:
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
