"""What a policy is given: checked costs, their integer form and the options."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_entrain.assign.numbers import integer_units
from lightning_entrain.errors import AssignmentError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One global batch to assign.

    Attributes:
        encoder_cost: Per sample, as given. Zero means text-only.
        llm_cost: Per sample, as given.
        encoder_units: The same rounded to integers, see :func:`numbers.integer_units`.
        llm_units: Likewise.
        order: Samples by (encoder cost, LLM cost) descending, ties by index: the order in which
            all policies that look at costs go through the samples.
        num_replicas: Data-parallel replicas.
        num_microbatches: Microbatches per replica at most (K).
        max_lag: 1 allows deferral by one microbatch, 0 forbids it.
        seed: Of the search, where a policy searches.
        equal_counts: Whether every replica must get equally many samples.
        limit_by_heaviest: Whether K is limited by the heaviest sample (paper, section 5.1).
        tokens: Per sample; zeros where no cap is set.
        max_tokens: Cap on the tokens of any encoder or LLM microbatch; None for no cap.
        ramp: Relative load targets per microbatch, None for equal ones.
        effort: Factor on the search's number of steps.
    """

    encoder_cost: list[float]
    llm_cost: list[float]
    encoder_units: list[int]
    llm_units: list[int]
    order: list[int]
    num_replicas: int
    num_microbatches: int
    max_lag: int = 1
    seed: int = 0
    equal_counts: bool = True
    limit_by_heaviest: bool = True
    tokens: list[int] = field(default_factory=list)
    max_tokens: int | None = None
    ramp: tuple[float, ...] | None = None
    effort: float = 1.0

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return len(self.encoder_cost)

    @property
    def replica_capacity(self) -> int:
        """Samples a replica may get at most."""
        if self.equal_counts:
            return self.num_samples // self.num_replicas
        return self.num_samples

    def has_image(self, sample: int) -> bool:
        """Whether the sample has encoder work."""
        return self.encoder_cost[sample] > 0

    def split_images(self, samples: Sequence[int]) -> tuple[list[int], list[int]]:
        """The samples with and those without encoder work, order kept."""
        images = [i for i in samples if self.encoder_cost[i] > 0]
        return images, [i for i in samples if self.encoder_cost[i] <= 0]

    def effective_microbatches(self, samples: Sequence[int]) -> int:
        """K_eff (paper, section 5.1): no more microbatches than the heaviest sample allows.

        Args:
            samples: One replica's.
        """
        units = [self.encoder_units[i] for i in samples]
        heaviest = max(units, default=0)
        if not self.limit_by_heaviest or heaviest == 0:
            return self.num_microbatches
        return max(1, min(self.num_microbatches, sum(units) // heaviest))


def build_problem(
    encoder_cost: ArrayLike,
    llm_cost: ArrayLike,
    *,
    num_replicas: int,
    num_microbatches: int,
    token_counts: ArrayLike | None = None,
    max_tokens: int | None = None,
    max_lag: int = 1,
    seed: int = 0,
    equal_counts: bool = True,
    limit_by_heaviest: bool = True,
    ramp: Sequence[float] | None = None,
    effort: float = 1.0,
) -> Problem:
    """Check the arguments of :func:`assign_samples` and bring them into exact form."""
    encoder = _costs("encoder_cost", encoder_cost)
    llm = _costs("llm_cost", llm_cost)
    if len(encoder) != len(llm):
        raise AssignmentError(
            f"encoder_cost has {len(encoder)} entries and llm_cost {len(llm)}",
            limit="one entry per sample in both",
        )
    _at_least_one("num_replicas", num_replicas)
    _at_least_one("num_microbatches", num_microbatches)
    if max_lag not in (0, 1):
        raise ConfigError(f"max_lag is {max_lag}", limit="0 or 1", remedy="0 forbids deferral")
    if not is_whole(seed):
        raise ConfigError(f"seed is {seed!r}", limit="a whole number", remedy="set seed=0")
    if not is_number(effort) or not 0 < effort <= MAX_EFFORT:
        raise ConfigError(
            f"effort is {effort!r}",
            limit=f"a number above 0, at most {MAX_EFFORT:g}",
            remedy="set effort=1",
        )
    if equal_counts and len(encoder) % num_replicas:
        raise AssignmentError(
            f"{len(encoder)} samples cannot be shared equally by {num_replicas} replicas",
            limit="the global batch is a multiple of num_replicas where equal_counts=True",
            remedy="change the global batch size or set equal_counts=False",
        )
    tokens = _tokens(token_counts, max_tokens, len(encoder))
    keys = [(-encoder[i], -llm[i], -tokens[i], i) for i in range(len(encoder))]
    return Problem(
        encoder_cost=encoder,
        llm_cost=llm,
        encoder_units=integer_units(encoder),
        llm_units=integer_units(llm),
        order=[key[3] for key in sorted(keys)],
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        max_lag=max_lag,
        seed=int(seed),
        equal_counts=equal_counts,
        limit_by_heaviest=limit_by_heaviest,
        tokens=tokens,
        max_tokens=max_tokens,
        ramp=_ramp(ramp),
        effort=effort,
    )


def place(
    problem: Problem,
    samples: Sequence[int],
    units: Sequence[int],
    bins: list[list[int]],
    loads: list[int],
    tokens: list[int],
) -> None:
    """Put each sample into the bin with the least load that has room; changes the lists.

    Ties go to the bin with fewer samples, then to the earlier one.

    Args:
        problem: Holds the tokens and their cap.
        samples: In the order they are placed.
        units: Integer cost per sample of the global batch.
        bins: Samples per bin.
        loads: Sum of ``units`` per bin.
        tokens: Sum of tokens per bin.

    Raises:
        AssignmentError: If no bin has room under the cap.
    """
    heap = [(loads[b], len(bins[b]), b) for b in range(len(bins))]
    heapq.heapify(heap)
    cap = problem.max_tokens
    for i in samples:
        full = []
        while heap and cap is not None and tokens[heap[0][2]] + problem.tokens[i] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            raise AssignmentError(
                f"None of {len(bins)} microbatches has room for sample {i}, "
                f"{problem.tokens[i]} tokens",
                limit=f"max_tokens is {cap} per microbatch",
                remedy="raise max_tokens or num_microbatches, or lower the batch size",
            )
        _, _, b = heap[0]
        bins[b].append(i)
        loads[b] += units[i]
        tokens[b] += problem.tokens[i]
        heapq.heapreplace(heap, (loads[b], len(bins[b]), b))
        for entry in full:
            heapq.heappush(heap, entry)


MAX_EFFORT = 1e6
MAX_COST = 1e300
"""Costs up to here can be summed over any batch."""


def _costs(name: str, values: ArrayLike) -> list[float]:
    array = _numbers(name, values)
    if array.ndim != 1:
        raise AssignmentError(f"{name} has {array.ndim} dimensions", limit="one entry per sample")
    bad = np.flatnonzero(~((array >= 0) & (array <= MAX_COST)))
    if bad.size:
        raise AssignmentError(
            f"{name}[{bad[0]}] is {array[bad[0]]}",
            limit=f"costs are finite numbers from 0 to {MAX_COST:g}",
            remedy="check the cost model or the sample's size",
        )
    return [abs(value) for value in array.tolist()]  # -0.0 becomes 0.0


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """The values as floats; of what is no number, numpy's texts and dates included, the first."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "biuf":
            return array.astype(np.float64)
        for i, value in enumerate(array.ravel().tolist()):
            if not isinstance(value, Real):
                raise AssignmentError(
                    f"{name}[{i}] is {value!r}",
                    limit="costs are real numbers",
                    remedy=f"give {name} as numbers, one per sample",
                )
        return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, AssignmentError):
            raise
        raise AssignmentError(
            f"{name} cannot be read as numbers: {error}",
            limit=f"one number from 0 to {MAX_COST:g} per sample",
        ) from error


def _tokens(counts: ArrayLike | None, cap: int | None, num_samples: int) -> list[int]:
    if cap is None:
        return [0] * num_samples
    _at_least_one("max_tokens", cap)
    if counts is None:
        raise ConfigError(
            f"max_tokens is {cap} but token_counts is missing",
            limit="a cap needs the samples' counts",
            remedy="give token_counts, one integer per sample",
        )
    array = np.asarray(counts)
    if array.shape != (num_samples,) or not np.issubdtype(array.dtype, np.integer):
        raise AssignmentError(
            f"token_counts has shape {array.shape} and type {array.dtype}",
            limit=f"{num_samples} integers, one per sample",
        )
    tokens: list[int] = array.tolist()
    for i, count in enumerate(tokens):
        if not 0 <= count <= cap:
            raise AssignmentError(
                f"token_counts[{i}] is {count}",
                limit=f"between 0 and max_tokens={cap}, because a sample cannot be cut",
                remedy="raise max_tokens or shorten the sample",
            )
    return tokens


def _ramp(ramp: Sequence[float] | None) -> tuple[float, ...] | None:
    if ramp is None:
        return None
    targets = list(ramp)
    if not targets or not all(is_number(value) and value > 0 for value in targets):
        raise ConfigError(
            f"ramp is {targets}",
            limit="positive load targets, relative to one another",
            remedy="leave ramp=None for equal microbatches",
        )
    return tuple(float(value) for value in targets)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number and no truth value."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real | np.number):
        return False
    return not isinstance(value, np.complexfloating) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of any numeric type."""
    return is_number(value) and value == int(value)


def _at_least_one(name: str, value: Any) -> None:
    if not is_whole(value) or value < 1:
        raise ConfigError(f"{name} is {value!r}", limit="a whole number of at least 1")
