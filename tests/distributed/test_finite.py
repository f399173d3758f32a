"""A loss that is no number is told once, by rank 0, with its step and what can be done."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_entrain.runtime.finite import FiniteCheck
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import run_ranks


class Poisoned(Module):
    """From the third step on a weight of the last stage is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            norm = self.model.llm.model.norm
            for parameter in norm.parameters():  # none where the norm is another rank's
                parameter.data.fill_(math.nan)
        return super().training_step(batch, batch_idx)


class PoisonedJob(Job):
    def module(self) -> Module:
        return Poisoned(super().module().model, self)


def _fit(job: Job, devices: int, root: Path) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = job.fit(EntrainStrategy(), devices, root).losses
    return losses, [text for w in caught if "training goes on" in (text := str(w.message))]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_such_loss_is_told(devices: int, tmp_path: Path) -> None:
    found = run_ranks(devices, _fit, PoisonedJob(num_batches=5), devices, tmp_path)
    for rank, (losses, told) in enumerate(found):
        assert [math.isnan(loss) for loss in losses] == [False, False, True, True, True]
        if rank == 0:
            assert len(told) == 1
            assert "The loss of step 3 is nan" in told[0]
            assert "detect_anomaly" in told[0]
            assert "learning rate" in told[0]
        else:
            assert not told
    sound = Job(num_batches=2).fit(EntrainStrategy(), 1, tmp_path)
    assert all(map(math.isfinite, sound.losses))


def test_a_loss_that_has_not_arrived_is_left_for_later() -> None:
    class Event:
        there = False

        def query(self) -> bool:
            return self.there

    check, event = FiniteCheck(), Event()
    check._pending.append((1, torch.tensor(math.inf), event))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.note(2, torch.tensor(1.0))
    event.there = True
    with pytest.warns(UserWarning, match="The loss of step 1 is inf"):
        check.note(3, torch.tensor(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.note(4, torch.tensor(math.nan))


def test_the_last_loss_is_told_at_the_end_and_a_new_run_begins_anew() -> None:
    class Event:
        waited = False

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            self.waited = True

    check, event = FiniteCheck(), Event()
    check._pending.append((7, torch.tensor(math.inf), event))
    check.note(8, torch.tensor(1.0))
    with pytest.warns(UserWarning, match="The loss of step 7 is inf"):
        check.flush()
    assert event.waited
    check.reset()
    with pytest.warns(UserWarning, match="The loss of step 1 is nan"):
        check.note(1, torch.tensor(math.nan))
