import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.types import ActionKind, Placement
from lightning_entrain.schedule.verify import verify

from .helpers import cases, full_rows, lowered
from .test_one_f_one_b import deferred_rows
from .test_simulate import random_costs, unit_costs


@given(cases(max_microbatches=5), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_never_worse_than_any_candidate_and_always_valid(case, seed):
    placement, rows = case
    costs = random_costs(seed, placement, rows)
    choice = choose_schedule(placement, rows, costs, num_steps=30, seed=seed)
    times = [t for t in choice.iteration_ms.values() if t is not None]
    assert choice.simulation.iteration_ms == choice.iteration_ms[choice.name]
    assert choice.simulation.iteration_ms <= min(times) * (1 + 1e-6)
    plain = simulate(build_1f1b(placement, rows), costs, rows)
    assert choice.simulation.iteration_ms <= plain.iteration_ms * (1 + 1e-6)
    own_rows = choice.tuned.reorder_rows(rows)
    verify(lowered(choice.tuned.schedule, own_rows), own_rows)


def test_the_same_arguments_give_the_same_schedule():
    placement, rows = Placement.one_per_rank(3, 2), full_rows(9)
    costs = random_costs(4, placement, rows)
    first, second = (choose_schedule(placement, rows, costs, max_bytes=9) for _ in range(2))
    assert first.tuned.schedule.digest() == second.tuned.schedule.digest()
    assert first.tuned.order == second.tuned.order


def test_memory_decides_what_is_compared():
    placement, rows = Placement.one_per_rank(5, 3), full_rows(16)
    costs = unit_costs(placement, rows)
    free = choose_schedule(placement, rows, costs)
    capped = choose_schedule(placement, rows, costs, max_bytes=4)
    assert capped.iteration_ms["1f1b"] is None  # the first stage holds 8
    assert max(capped.simulation.peak_bytes) <= 4
    assert capped.simulation.iteration_ms > free.simulation.iteration_ms
    assert free.name.startswith("zero_bubble")


def test_least_memory_is_named_and_would_do():
    placement, rows = Placement.colocated(2, 2, 2), full_rows(4)
    costs = random_costs(0, placement, rows)
    with pytest.raises(ScheduleError) as caught:
        choose_schedule(placement, rows, costs, max_bytes=0.5)
    least = float(re.search(r"needs (\d+(\.\d+)?)", str(caught.value))[1])
    choice = choose_schedule(placement, rows, costs, max_bytes=least * 1.0001)
    assert max(choice.simulation.peak_bytes) <= least * 1.001


def test_families():
    placement, rows = Placement.one_per_rank(2, 2), full_rows(6)
    costs = unit_costs(placement, rows)
    choice = choose_schedule(placement, rows, costs, families=["1f1b"])
    kinds = {a.kind for own in choice.tuned.schedule.ranks for a in own}
    assert kinds == {ActionKind.F, ActionKind.B}
    with pytest.raises(ScheduleError, match="2f2b"):
        choose_schedule(placement, rows, costs, families=["2f2b"])


def test_a_shared_boundary_balances_what_whole_layers_cannot():
    rows = full_rows(24)
    # 3 ranks, encoder work 1.5, LLM work 1.5: groups of 1 + 2 or 2 + 1 leave one rank with 1.5.
    groups = Placement.one_per_rank(1, 2)
    shared = Placement.shared_boundary(2, 2)
    loads = np.full(24, 1.5)
    in_groups = StepCosts.from_loads(groups, loads, loads, [1, 0.5, 0.5])
    on_both = StepCosts.from_loads(shared, loads, loads, [2 / 3, 1 / 3, 1 / 3, 2 / 3])
    slow = choose_schedule(groups, rows, in_groups).simulation
    fast = choose_schedule(shared, rows, on_both).simulation
    assert slow.bottleneck_ms == pytest.approx(24 * 4.5)
    assert fast.bottleneck_ms == pytest.approx(24 * 3)
    assert fast.iteration_ms < 0.75 * slow.iteration_ms


def test_eager_forward_hides_deferral_as_far_as_memory_allows():
    # Half of every encoder microbatch is decoded one later: its activations live longer.
    placement, rows = Placement.one_per_rank(2, 2), deferred_rows(12)
    costs = unit_costs(placement, rows)
    choice = choose_schedule(placement, rows, costs, families=["1f1b"])
    times = choice.iteration_ms
    assert times["1f1b_split_eager1"] < times["1f1b_split"] < times["1f1b"]
    assert times["1f1b_eager1"] < times["1f1b"]
    for held in (4, 5):
        capped = choose_schedule(placement, rows, costs, families=["1f1b"], max_bytes=held)
        assert None not in capped.iteration_ms.values()
        assert max(capped.simulation.peak_live) <= held
        assert capped.simulation.iteration_ms >= choice.simulation.iteration_ms


def test_b_stays_whole_where_splitting_it_gains_nothing():
    rows = full_rows(6)
    one_rank = Placement.contiguous(2, 2, 1)
    choice = choose_schedule(one_rank, rows, random_costs(1, one_rank, rows))
    assert choice.name == "1f1b"
    assert {t is None for n, t in choice.iteration_ms.items() if n != "1f1b"} == {True}
    # A frozen encoder before one trained stage: nobody waits for an I.
    frozen = replace(Placement.one_per_rank(2, 1), first_backward=2)
    choice = choose_schedule(frozen, rows, random_costs(1, frozen, rows), may_reorder=False)
    assert choice.name.startswith("1f1b")
    assert choice.iteration_ms["zero_bubble_tuned"] == pytest.approx(choice.simulation.iteration_ms)
