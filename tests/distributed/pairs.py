"""Few combinations that hold every wanted pair of values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def covering(
    values: Mapping[str, Sequence[Any]],
    *,
    wanted: Collection[str],
    allowed: Callable[[Case], bool],
) -> list[Case]:
    """Cases in which each value of a wanted dimension meets each value of every other one.

    Greedy and the same on every call. Pairs that are not allowed are left out.

    Args:
        values: Per dimension its values.
        wanted: Dimensions whose pairs, among each other and with the rest, are covered.
        allowed: Whether a combination, of some or of all dimensions, can be had.
    """
    open_pairs = [
        pair
        for a, b in combinations(values, 2)
        if a in wanted or b in wanted
        for pair in ({a: x, b: y} for x, y in product(values[a], values[b]))
        if allowed(pair)
    ]
    cases: list[Case] = []
    while open_pairs:
        case = dict(open_pairs[0])
        for name, choices in values.items():
            if name in case:
                continue
            case[name] = max(
                (value for value in choices if allowed({**case, name: value})),
                key=lambda value: _num_met(open_pairs, {**case, name: value}),
            )
        open_pairs = [pair for pair in open_pairs if not pair.items() <= case.items()]
        cases.append(case)
    return cases


def _num_met(pairs: Sequence[Case], case: Case) -> int:
    return sum(pair.items() <= case.items() for pair in pairs)
