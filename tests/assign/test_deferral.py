from __future__ import annotations

import itertools
import random

import pytest

from lightning_entrain.assign.deferral import defer_pairwise, subset_sums

FIGURE_8 = [[3], [4], [6, 2], [3, 3], [6], [6, 3]]
"""LLM weights of the samples of MB1..MB6 in figure 8 of the paper."""


@pytest.mark.parametrize(
    ("over", "under", "value"),
    [
        *[(3, 1, 6), (4, 1, 6), (6, 1, 6)],
        *[(3, 2, 6), (4, 2, 6), (6, 2, 7)],
        *[(3, 5, 8), (4, 5, 6), (6, 5, 9)],
    ],
)
def test_pair_values_of_figure_9(over: int, under: int, value: int) -> None:
    assert defer_pairwise([FIGURE_8[over - 1], FIGURE_8[under - 1]]).bottleneck == value


def test_pairs_of_figure_9() -> None:
    plan = defer_pairwise(FIGURE_8)
    assert plan.bottleneck == 6
    assert {(i + 1, j + 1) for i, j, _ in plan.pairs} == {(3, 2), (6, 1), (4, 5)}
    # MB3 defers its sample of weight 2, MB6 that of weight 3, MB4 nothing.
    assert {i + 1: deferred for i, _, deferred in plan.pairs} == {3: (1,), 6: (1,), 4: ()}
    loads = [sum(entry) for entry in FIGURE_8]
    for i, j, deferred in plan.pairs:
        moved = sum(FIGURE_8[i][s] for s in deferred)
        assert loads[i] - moved == loads[j] + moved == 6
    # Each overloaded microbatch runs right before its partner, the heaviest pair first.
    assert [k + 1 for k in plan.order] == [6, 1, 3, 2, 4, 5]


def test_a_tie_defers_nothing() -> None:
    # 9 against 6: moving 3 would only exchange the two loads.
    (pair,) = defer_pairwise([[6, 3], [6]]).pairs
    assert pair == (0, 1, ())
    # 16 against 10: deferring 2 or 4 is equally good, the smaller is taken.
    assert defer_pairwise([[4, 2, 10], [10]]).pairs == ((0, 1, (1,)),)


def _bottleneck_by_enumeration(weights: list[list[int]], odd: str) -> int:
    loads = [sum(entry) for entry in weights]
    ranking = sorted(range(len(loads)), key=lambda k: (-loads[k], k))
    half = len(loads) // 2
    over, under = ranking[:half], ranking[half:]
    if odd == "alone" and len(loads) % 2:
        under = under[1:]
    best = max((loads[i] for i in over), default=0)
    for partners in itertools.permutations(under, half):
        worst = 0
        for i, j in zip(over, partners, strict=True):
            pair = loads[i]
            for size in range(len(weights[i]) + 1):
                for subset in itertools.combinations(weights[i], size):
                    pair = min(pair, max(loads[i] - sum(subset), loads[j] + sum(subset)))
            worst = max(worst, pair)
        best = min(best, worst)
    return best


@pytest.mark.parametrize("odd", ["alone", "lower"])
@pytest.mark.parametrize("num_microbatches", range(1, 8))
def test_bottleneck_equals_enumeration(num_microbatches: int, odd: str) -> None:
    generator = random.Random(num_microbatches)
    for _ in range(40):
        weights = [
            [generator.randint(0, 9) for _ in range(generator.randint(0, 4))]
            for _ in range(num_microbatches)
        ]
        plan = defer_pairwise(weights, odd=odd)  # type: ignore[arg-type]
        assert plan.bottleneck == _bottleneck_by_enumeration(weights, odd)
        loads = [sum(entry) for entry in weights]
        reached = 0
        for i, j, deferred in plan.pairs:
            moved = sum(weights[i][s] for s in deferred)
            reached = max(reached, loads[i] - moved, loads[j] + moved)
        assert reached == plan.bottleneck
        assert sorted(plan.order) == list(range(num_microbatches))


def test_an_odd_one_is_alone_or_in_the_lower_half() -> None:
    weights = [[5, 4], [4], [1]]
    alone = defer_pairwise(weights)
    assert (alone.pairs, alone.unpaired) == (((0, 2, (1,)),), (1,))
    assert {defer_pairwise(weights, odd="lower").pairs[0][1]} <= {1, 2}


def test_a_full_partner_refuses_deferral() -> None:
    weights, tokens = [[5, 4], [1]], [[10, 10], [15]]
    assert defer_pairwise(weights, tokens=tokens, max_tokens=25).pairs == ((0, 1, (1,)),)
    assert defer_pairwise(weights, tokens=tokens, max_tokens=24).pairs == ((0, 1, ()),)


def test_subset_sums_are_exact_up_to_the_limit_and_spread_beyond() -> None:
    sums, masks = subset_sums([3, 5, 0, 9], 4096)
    assert sums == [0, 3, 5, 8, 9, 12, 14, 17]
    for total, mask in zip(sums, masks, strict=True):
        assert sum(w for n, w in enumerate([3, 5, 0, 9]) if mask >> n & 1) == total
    weights = [1 + 37 * n for n in range(24)]
    sums, masks = subset_sums(weights, 256)
    assert len(sums) <= 257
    assert (sums[0], sums[-1]) == (0, sum(weights))
    assert max(b - a for a, b in itertools.pairwise(sums)) < 2 * sum(weights) / 254
    for total, mask in zip(sums, masks, strict=True):
        assert sum(w for n, w in enumerate(weights) if mask >> n & 1) == total
