"""Which ranks the others may be waiting for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_entrain.runtime.activity import Activity, Report, in_words, suspects
from lightning_entrain.runtime.faults import FaultWatch, is_lost_connection


def report(what: str, count: int = 7, *, waits: bool = False, stands: float) -> Report:
    return Report(what=what, waits=waits, stands_seconds=stands, count=count)


BEFORE = {
    0: report("1RECV_F2", waits=True, stands=30),
    1: report("3F2", stands=21),
    2: report("2B1", stands=0.5),
    3: report("2RECV_F0", waits=True, stands=40),
    4: report("training_step", stands=22),
}
AFTER = {rank: replace(report, count=9) for rank, report in BEFORE.items() if rank != 3}


def test_those_that_stand_still_and_do_not_wait() -> None:
    found = suspects(BEFORE, {**AFTER, 3: BEFORE[3]}, 3.0, longer_than=3.0)
    assert [rank for rank, _ in found] == [3, 4, 1]
    assert found[0][1] == "rank 3 no longer reports, and was in 2RECV_F0"
    assert found[2][1] == "rank 1 has been in 3F2 for 21 s"
    assert in_words(found, at_most=2).endswith("; and 1 more")


def test_a_lost_connection_is_no_reason_to_blame_a_rank_that_works() -> None:
    found = suspects(BEFORE, {**AFTER, 3: BEFORE[3]}, 3.0, longer_than=None)
    assert [rank for rank, _ in found] == [3]
    assert suspects({}, BEFORE, 3.0, longer_than=None) == []


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[/gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:4", True),
        ("Timed out waiting 3000ms for recv operation to complete", True),
        ("NCCL communicator was aborted", True),
        ("ProcessGroupGloo is gone", True),
        ("the tokens could not be restored", False),
        ("no object store has this key", False),
        ("no connection to the image server", False),
    ],
)
def test_only_ranks_are_lost_connections(text: str, lost: bool) -> None:
    assert is_lost_connection(RuntimeError(text)) is lost


def test_one_rank_reads_all_reports_at_once() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watches = [FaultWatch(rank, 5, Activity(), "127.0.0.1", store.port) for rank in range(5)]
    for watch in watches[:4]:  # the last one has not said anything yet
        watch._activity.enter(f"a{watch._rank}")
        watch._tell_activity()
    assert [watch._looks_for_all() for watch in watches] == [True, False, False, False, False]
    found = watches[1]._reports()
    assert {rank: each.what for rank, each in found.items()} == {0: "a0", 2: "a2", 3: "a3"}


def test_an_activity_stays_where_an_error_was() -> None:
    activity = Activity()
    activity.enter("a")
    with activity.during("b", waits=True):
        assert (activity.report().what, activity.waits_for) == ("b", "b")
    assert (activity.report().what, activity.waits_for) == ("a", None)
    with pytest.raises(ValueError, match="planted"), activity.during("c", waits=True):
        raise ValueError("planted")
    assert activity.report().waits
    assert Report.from_dict(activity.report().to_dict()).what == "c"
