"""Rows that are not what the samples' sizes announced stop a run, also on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module


class MoreLabels(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        for row in batch.labels.values():
            row[(row == -100).nonzero()[0]] = 1
        return batch


class MoreLabelsJob(Job):
    def module(self) -> Module:
        return MoreLabels(super().module().model, self)


@pytest.mark.parametrize("strategy", [None, EntrainStrategy()])
def test_a_label_too_many_is_not_dropped(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeMismatchError, match=r"microbatch 0 of replica 0 has \d+ label"):
        MoreLabelsJob(num_batches=1).fit(strategy, 1, tmp_path)
