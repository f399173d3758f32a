"""A rank is killed at a random moment; training goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

kill_drill = pytest.importorskip("benchmarks.kill_drill")


def test_goes_on_exactly_after_a_kill(tmp_path: Path) -> None:
    for name in ("whole", "drill"):
        (tmp_path / name).mkdir()
    whole = kill_drill.uninterrupted(tmp_path / "whole")
    assert [len(losses) for losses in whole] == [kill_drill.NUM_STEPS] * kill_drill.NUM_RANKS
    point = kill_drill.random_points(6, seed=2)[5]
    assert point.checkpoint == "sharded"
    outcome = kill_drill.drill(point, tmp_path / "drill", whole, limit=20.0)
    assert outcome.equal
    assert outcome.num_losses == kill_drill.NUM_STEPS - outcome.resumed_from_step
    assert 0 < outcome.resumed_from_step <= point.step + 1
