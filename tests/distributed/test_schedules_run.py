"""Deferral, split-backward and zero bubble train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_entrain.data.batch import DataNeeds
from tests.distributed.job import Batches, Job, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal

JOB = Job(num_batches=4, batch_size=12, num_microbatches=4, policy="entrain", text_only=0.2)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return JOB.fit(None, 1, tmp_path_factory.mktemp("one")).to_numpy()


def test_the_batches_defer_samples() -> None:
    batches = Batches(JOB, 1, DataNeeds.everything())
    assert any(batches[i].assignment.replicas[0].max_lag == 1 for i in range(len(batches)))


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_split", "1f1b_eager", "zero_bubble"])
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(2, {}, id="1+1"),
        pytest.param(4, {"encoder_stages": 2}, id="2+2"),
        pytest.param(4, {"replicas": 2}, id="2x(1+1)"),
    ],
)
def test_schedule_with_deferral(
    schedule: str, devices: int, options: dict[str, Any], one: Outcome, tmp_path: Path
) -> None:
    options = {**options, "schedule": schedule}
    ranks = run_ranks(devices, fit_on_rank, JOB, options, devices, tmp_path)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b_eager", "zero_bubble"])
def test_one_process_runs_all_stages_with_deferral(
    schedule: str, one: Outcome, tmp_path: Path
) -> None:
    options = {"encoder_stages": 2, "llm_stages": 3, "schedule": schedule}
    assert_equal([fit_on_rank(JOB, options, 1, tmp_path)], one, parameters=1e-4, gradients=1e-6)
