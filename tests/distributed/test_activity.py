"""Which ranks the others may be waiting for."""

from __future__ import annotations

import time

import pytest

from lightning_entrain.runtime.activity import Activity, Report, in_words, suspects


def report(what: str, *, waits: bool = False, since: float, seen: float = 0.0) -> Report:
    now = time.time()
    return Report(what=what, waits=waits, since=now - since, seen=now - seen)


def test_those_that_stand_still_and_do_not_wait() -> None:
    reports = {
        0: report("1RECV_F2", waits=True, since=30),
        1: report("3F2", since=21),
        2: report("2B1", since=0.5),
        3: report("2RECV_F0", waits=True, since=40, seen=40),
        4: report("training_step", since=22),
    }
    found = suspects(reports, 3.0)
    assert [rank for rank, _ in found] == [3, 4, 1]
    assert found[0][1] == "rank 3 has not reported for 40 s, and was in 2RECV_F0 then"
    assert found[2][1] == "rank 1 has been in 3F2 for 21 s"
    assert in_words(found, at_most=2).endswith("; and 1 more")


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
