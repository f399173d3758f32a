"""Pairwise deferral: even LLM loads by moving samples one microbatch on (paper, section 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

OddRule = Literal["alone", "lower"]
_REFUSED = 2**62


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """What each pair of microbatches does.

    Attributes:
        pairs: (overloaded, underloaded, deferred): indices of two microbatches, and which positions
            of the overloaded one's samples are deferred into the underloaded one. In execution
            order: each overloaded microbatch runs right before its partner.
        unpaired: Microbatches without a partner; they run last.
        bottleneck: T*, the least possible value of the largest load of an overloaded microbatch
            after deferral, or of its partner's.
    """

    pairs: tuple[tuple[int, int, tuple[int, ...]], ...]
    unpaired: tuple[int, ...]
    bottleneck: int

    @property
    def order(self) -> tuple[int, ...]:
        """Microbatches in execution order."""
        return tuple(k for i, j, _ in self.pairs for k in (i, j)) + self.unpaired


def defer_pairwise(
    weights: Sequence[Sequence[int]],
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    max_tokens: int | None = None,
    odd: OddRule = "alone",
    max_sums: int = 4096,
) -> Deferral:
    """Pair overloaded with underloaded microbatches and choose what is deferred.

    Args:
        weights: Per microbatch the integer LLM costs of its samples.
        tokens: Per microbatch the tokens of its samples; needed with ``max_tokens``.
        max_tokens: A pair whose underloaded microbatch would exceed this defers nothing.
        odd: With an odd number of microbatches, leave the middle one ``alone`` or count it to the
            ``lower`` half, where one microbatch then stays without a partner.
        max_sums: Distinct subset sums kept per microbatch. Up to this number (12 samples at 4096)
            the nearest sum is exact, beyond it the kept sums are spread evenly.
    """
    loads = [sum(entry) for entry in weights]
    ranking = sorted(range(len(loads)), key=lambda k: (-loads[k], k))
    half = len(loads) // 2
    over, lower = ranking[:half], ranking[half:]
    alone: list[int] = []
    if odd == "alone" and len(lower) > half:
        alone, lower = lower[:1], lower[1:]
    values, chosen = _pair_values(over, lower, weights, loads, tokens, max_tokens, max_sums)
    own = np.array([loads[i] for i in over], dtype=np.int64)
    bottleneck, matched = _bottleneck_matching(values, own)
    free = [j for j in range(len(lower)) if j not in set(matched.values())]
    pairs = []
    for row, i in enumerate(over):
        if row in matched:
            column = matched[row]
            pairs.append((i, lower[column], _samples_of(chosen[row][column])))
        else:
            pairs.append((i, lower[free.pop(0)], ()))
    rest = [lower[column] for column in free]
    return Deferral(pairs=tuple(pairs), unpaired=tuple(alone + rest), bottleneck=bottleneck)


def subset_sums(weights: Sequence[int], max_sums: int) -> tuple[list[int], list[int]]:
    """Sums that subsets of the samples can have, ascending, with a subset (bit mask) for each.

    Dynamic programming over the samples. Where more than ``max_sums`` differ, sums are dropped so
    that those kept lie evenly.
    """
    reachable = {0: 0}
    for position, weight in enumerate(weights):
        if weight == 0:
            continue
        for total, mask in list(reachable.items()):
            reachable.setdefault(total + weight, mask | 1 << position)
        if len(reachable) > max_sums:
            reachable = _thin(reachable, max_sums)
    sums = sorted(reachable)
    return sums, [reachable[total] for total in sums]


def _thin(reachable: dict[int, int], max_sums: int) -> dict[int, int]:
    top = max(reachable)
    cells: dict[int, int] = {}
    for total in sorted(reachable):
        cells.setdefault(total * (max_sums - 2) // top, total)
    kept = [*cells.values(), top]
    return {total: reachable[total] for total in kept}


def _pair_values(
    over: list[int],
    lower: list[int],
    weights: Sequence[Sequence[int]],
    loads: list[int],
    tokens: Sequence[Sequence[int]] | None,
    max_tokens: int | None,
    max_sums: int,
) -> tuple[NDArray[np.int64], list[list[int]]]:
    """V_ij = max(w_i - d, w_j + d) with the sum d nearest to (w_i - w_j) / 2, and d's subset.

    Of two sums equally near the smaller is taken, so that ties defer less.
    """
    values = np.zeros((len(over), len(lower)), dtype=np.int64)
    masks: list[list[int]] = []
    partner = np.array([loads[j] for j in lower], dtype=np.int64)
    for row, i in enumerate(over):
        ordered, subsets = subset_sums(weights[i], max_sums)
        sums = np.array(ordered, dtype=np.int64)
        gap = loads[i] - partner
        above = np.searchsorted(2 * sums, gap).clip(1, len(sums) - 1) if len(sums) > 1 else 0 * gap
        below = np.maximum(above - 1, 0)
        nearest = np.where(gap - 2 * sums[below] <= 2 * sums[above] - gap, below, above)
        moved = sums[nearest]
        values[row] = np.maximum(loads[i] - moved, partner + moved)
        masks.append([subsets[n] for n in nearest])
        if max_tokens is not None and tokens is not None:
            for column, j in enumerate(lower):
                extra = sum(tokens[i][s] for s in _samples_of(masks[row][column]))
                if sum(tokens[j]) + extra > max_tokens:
                    values[row, column] = _REFUSED
    return values, masks


def _samples_of(mask: int) -> tuple[int, ...]:
    return tuple(position for position in range(mask.bit_length()) if mask >> position & 1)


def _bottleneck_matching(
    values: NDArray[np.int64], own: NDArray[np.int64]
) -> tuple[int, dict[int, int]]:
    """Least T such that every row with own load above T has its own column of value at most T.

    Returns:
        T, and the column of each row that needed one.
    """
    if not own.size:
        return 0, {}
    # At the largest own load no row needs a partner, so the search always ends in success.
    candidates = np.unique(np.concatenate([values[values <= own.max()], own])).tolist()
    low, high = 0, len(candidates) - 1
    best: dict[int, int] = {}
    while low < high:
        middle = (low + high) // 2
        matched = _match(values, own, candidates[middle])
        if matched is None:
            low = middle + 1
        else:
            high, best = middle, matched
    return candidates[high], best


def _match(values: NDArray[np.int64], own: NDArray[np.int64], limit: int) -> dict[int, int] | None:
    """Match all rows with own load above ``limit`` by augmenting paths; None if impossible."""
    column_of: dict[int, int] = {}
    row_of: dict[int, int] = {}
    usable = values <= limit
    for row in np.flatnonzero(own > limit).tolist():
        if not _augment(row, usable, column_of, row_of):
            return None
    return column_of


def _augment(
    start: int, usable: NDArray[np.bool_], column_of: dict[int, int], row_of: dict[int, int]
) -> bool:
    """Extend the matching by ``start`` along a shortest alternating path."""
    came_from: dict[int, int] = {}
    unseen = np.ones(usable.shape[1], dtype=bool)
    queue = deque([start])
    while queue:
        row = queue.popleft()
        reached = np.flatnonzero(usable[row] & unseen)
        unseen[reached] = False
        for column in reached.tolist():
            came_from[column] = row
            if column not in row_of:
                while True:
                    row = came_from[column]
                    previous = column_of.get(row)
                    column_of[row], row_of[column] = column, row
                    if previous is None:
                        return True
                    column = previous
            queue.append(row_of[column])
    return False
