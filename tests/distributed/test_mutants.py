"""The equality tests notice a runtime that is subtly wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_entrain import strategy as strategy_module
from lightning_entrain.runtime import executor as executor_module
from lightning_entrain.runtime import precision as precision_module
from lightning_entrain.runtime.accumulate import GradientAccumulator
from lightning_entrain.runtime.transfer import Transfers
from lightning_entrain.runtime.weight_store import WeightStore
from tests.distributed.job import Job, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal

EQUAL_IMAGES = Job(
    num_batches=2, batch_size=6, num_microbatches=6, text_only=0.0, min_side=112, max_side=112
)
DEFERRING = Job(num_batches=2, batch_size=12, num_microbatches=4, policy="entrain")


def drop_a_gradient() -> None:
    true = executor_module._gradient_of
    calls = []

    def mutant(leaf: torch.Tensor) -> torch.Tensor:
        calls.append(leaf)
        return torch.zeros_like(leaf) if len(calls) == 2 else true(leaf)

    executor_module._gradient_of = mutant


def swap_two_messages() -> None:
    true = Transfers.take

    def mutant(self: Transfers, message: Any) -> torch.Tensor:
        shape = (message.rows, message.columns)
        for other in self._receives:
            if other != message and (other.rows, other.columns) == shape:
                found = self._receives
                found[message], found[other] = found[other], found[message]
                break
        return true(self, message)

    Transfers.take = mutant  # type: ignore[method-assign]


def average_the_replicas() -> None:
    true = strategy_module.sum_over_replicas

    def mutant(parameters: Any, group: Any) -> None:
        true(parameters, group)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= 2

    strategy_module.sum_over_replicas = mutant


def drop_some_weight_work() -> None:
    true = WeightStore.flush

    def mutant(self: WeightStore, work: Any) -> None:
        true(self, list(work)[1:])

    WeightStore.flush = mutant  # type: ignore[method-assign]


def clip_by_the_stage() -> None:
    def mutant(gradients: Any, device: torch.device, group: Any) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    precision_module.global_norm = mutant


def keep_the_last_gradient_only() -> None:
    def mutant(self: GradientAccumulator, parameter: Any, gradient: torch.Tensor) -> None:
        parameter.grad = gradient

    GradientAccumulator.add = mutant  # type: ignore[method-assign]


def fit_mutant(mutate: Callable[[], None], job: Job, options: Any, devices: int, root: Path) -> Any:
    mutate()  # in a forked process of its own
    return fit_on_rank(job, options, devices, root)


CLIPPED = Job(num_batches=3, trainer={"gradient_clip_val": 0.01})
MUTANTS = [
    pytest.param(drop_a_gradient, DEFERRING, 2, {"schedule": "1f1b_split"}, id="gradient"),
    pytest.param(swap_two_messages, EQUAL_IMAGES, 2, {"schedule": "1f1b_eager"}, id="messages"),
    pytest.param(average_the_replicas, DEFERRING, 4, {"replicas": 2}, id="replicas"),
    pytest.param(drop_some_weight_work, DEFERRING, 2, {"schedule": "zero_bubble"}, id="weights"),
    pytest.param(clip_by_the_stage, CLIPPED, 2, {}, id="clipping"),
    pytest.param(
        keep_the_last_gradient_only, DEFERRING, 2, {"schedule": "zero_bubble"}, id="accumulation"
    ),
]


@pytest.mark.parametrize(("mutate", "job", "devices", "options"), MUTANTS)
def test_mutant_is_noticed(
    mutate: Callable[[], None], job: Job, devices: int, options: Any, tmp_path: Path
) -> None:
    one: Outcome = job.fit(None, 1, tmp_path).to_numpy()
    straight = run_ranks(devices, fit_on_rank, job, options, devices, tmp_path)
    assert_equal(straight, one, parameters=1e-4, gradients=1e-6)
    wrong = run_ranks(devices, fit_mutant, mutate, job, options, devices, tmp_path)
    with pytest.raises(AssertionError):
        assert_equal(wrong, one, parameters=1e-4, gradients=1e-6)
