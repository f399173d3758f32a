"""Ranks that are started along with rank 0 wait until it has prepared the data."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import lightning_entrain.data.waiting as waiting
from lightning_entrain import EntrainDataModule, train
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.data.waiting import FailureNote, wait_until_prepared
from lightning_entrain.errors import DataError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_SILENT_SECONDS", 0.1)


def make(cache_dir: Path) -> EntrainDataModule:
    return EntrainDataModule(
        SyntheticSource(20, max_side=60),
        global_batch_size=4,
        vocab_size=300,
        cache_dir=str(cache_dir),
        progress=False,
    )


def test_another_rank_reads_what_rank_0_writes_later(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture
) -> None:
    first, other = make(tmp_path), make(tmp_path)
    assert not other.is_prepared()
    with pytest.raises(DataError):
        other.tokenizer  # noqa: B018
    timer = threading.Timer(0.4, first.prepare_data)
    timer.start()
    try:
        wait_until_prepared(other.is_prepared, rank=1, timeout_seconds=30)
    finally:
        timer.join()
    assert other.tokenizer.vocab_size == first.tokenizer.vocab_size
    other.setup("fit")
    assert len(other.dataset) == 20
    assert capsys.readouterr().err == "[rank 1] waiting for rank 0 to prepare the data\n"


def test_a_rank_does_not_wait_for_ever(quick: None) -> None:
    with pytest.raises(DataError, match=r"Rank 3 has waited .* data\.cache_dir"):
        wait_until_prepared(lambda: False, rank=3, timeout_seconds=0.1)


def test_with_a_warm_cache_nobody_waits(tmp_path: Path, monkeypatch: Any) -> None:
    make(tmp_path).prepare_data()
    monkeypatch.setattr(waiting.time, "sleep", pytest.fail)
    wait_until_prepared(make(tmp_path).is_prepared, rank=1)


def test_a_failure_of_rank_0_ends_the_wait(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    first, other = FailureNote.of_job(tmp_path), FailureNote.of_job(tmp_path)
    with pytest.raises(ValueError, match="damaged"), first.left_behind():
        raise ValueError("shard 3 is damaged")
    with pytest.raises(DataError, match=r"Rank 0 could not prepare .*shard 3 is damaged"):
        wait_until_prepared(lambda: False, rank=1, timeout_seconds=30, failure=other.read)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert FailureNote.of_job(tmp_path).read() is None
    with first.left_behind():  # the next try of the same job
        assert other.read() is None


@pytest.mark.parametrize(
    ("environment", "prepares"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3", "LOCAL_RANK": "1"}, False),
    ],
)
def test_one_rank_of_each_machine_prepares(
    environment: dict[str, str], prepares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    datamodule = make(tmp_path)
    if prepares:
        train._prepare(datamodule, timeout_seconds=0.0)
        monkeypatch.setattr(datamodule, "prepare_data", lambda: None)
        train._prepare(datamodule, timeout_seconds=0.0)
    else:
        with pytest.raises(DataError, match=r"Rank 3 has waited .*prepare_timeout_seconds=0"):
            train._prepare(datamodule, timeout_seconds=0.0)
    assert datamodule.is_prepared() is prepares
