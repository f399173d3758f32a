"""Runs of the search kernel: from costs and places to the kernel's integers and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache

from lightning_entrain.assign.problem import Problem
from lightning_entrain.errors import AssignmentError

_BLOCK = 256
_WINDOW = 16
_MOST_SAMPLES = 1 << 20
_SHARES = (3072, 3280)
"""Of 4096 steps: exchanges, moves up to here, then lag flips."""


@dataclass(frozen=True)
class Start:
    """Encoder (-1: none) and LLM microbatch per sample, and the score once known."""

    encoder: list[int]
    llm: list[int]
    score: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Samples to be placed in bins.

    Attributes:
        problem: Holds costs, tokens, lag and ramp.
        samples: Global-batch indices; those with images first, each part sorted by size.
        num_images: How many have images.
        num_bins: Microbatches (or replicas).
        exchanges_only: Whether numbers of samples per bin stay as they are.
    """

    problem: Problem
    samples: Sequence[int]
    num_images: int
    num_bins: int
    exchanges_only: bool = False

    @property
    def scale(self) -> int:
        """Mean load in kernel units: 2^20, or less so that the sum of all stays below 2^30."""
        return 1 << min(20, 30 - self.num_bins.bit_length())

    @cached_property
    def weight(self) -> list[list[int]]:
        """Encoder, LLM and token weight per sample."""
        problem = self.problem
        return [
            self._scaled([problem.encoder_units[i] for i in self.samples]),
            self._scaled([problem.llm_units[i] for i in self.samples]),
            [problem.tokens[i] for i in self.samples],
        ]

    @cached_property
    def target(self) -> list[int]:
        """Load target per microbatch, equal for both modules."""
        if self.problem.ramp is None:
            return [self.scale] * self.num_bins
        profile = [Fraction(value) for value in self.problem.ramp]
        return [round(self.scale * self.num_bins * value / sum(profile)) for value in profile]

    def loads(self, slots: Start) -> list[list[int]]:
        """Rows of the kernel's ``load``."""
        rows = [[0] * self.num_bins for _ in range(4)]
        for row, target in ((0, self.weight[0]), (1, self.weight[1])):
            if any(target):
                rows[row] = [-value for value in self.target]
        for k, j, e, m, t in zip(slots.encoder, slots.llm, *self.weight, strict=True):
            if k >= 0:
                rows[0][k] += e
                rows[2][k] += t
            rows[1][j] += m
            rows[3][j] += t
        return rows

    def score(self, slots: Start) -> int:
        """Sum of squared deviations from the targets, over both modules."""
        rows = self.loads(slots)
        return sum(x * x for row in rows[:2] for x in row)

    def heaviest(self, slots: Start) -> int:
        """Largest deviation of any bin in either module."""
        return max(max(row) for row in self.loads(slots)[:2])

    def fits(self, slots: Start) -> bool:
        """Whether the token cap holds."""
        cap = self.problem.max_tokens
        return cap is None or max(max(row) for row in self.loads(slots)[2:]) <= cap

    def ceiling(self, slots: Start) -> int:
        """Largest combined deviation of a microbatch."""
        rows = self.loads(slots)
        return max(e + m for e, m in zip(rows[0], rows[1], strict=True))

    def _scaled(self, units: list[int]) -> list[int]:
        total = sum(units)
        if total == 0:
            return units
        whole = self.scale * self.num_bins
        return [(2 * unit * whole + total) // (2 * total) for unit in units]


def run_anneal(
    job: Job,
    start: Start,
    temperatures: tuple[int, int],
    num_steps: int,
    seed: int,
    *,
    ceiling: int = 0,
) -> Start:
    """One run of the kernel.

    Args:
        job: What is to be placed.
        start: Where from.
        temperatures: First and last, as deviations in units of 10^-4 of the mean load.
        num_steps: Rounded up to a multiple of 256, with a sixteenth more at temperature 0.
        seed: Any 64-bit number.
        ceiling: Combined deviation that no microbatch may exceed; 0 for no limit.

    Returns:
        The places at the end and their score.

    Raises:
        AssignmentError: If there are more samples than the kernel can index.
    """
    # Only here, so that everything but the search works without loading a compiler.
    from lightning_entrain.assign import kernel

    num_samples = len(job.samples)
    if num_samples > _MOST_SAMPLES:
        raise AssignmentError(
            f"{num_samples} samples are to be searched at once",
            limit=f"at most {_MOST_SAMPLES}",
            remedy="use policy='entrain' or a smaller global batch",
        )
    hot, cold = ((t * job.scale // 10_000) ** 2 + 1 for t in temperatures)
    num_blocks = -(-num_steps // _BLOCK)
    exchanges, moves = (4096, 4096) if job.exchanges_only else _SHARES
    rules = [0] * 7
    rules[kernel.NUM_IMAGES] = job.num_images
    rules[kernel.MAX_LAG] = job.problem.max_lag
    rules[kernel.MAX_TOKENS] = job.problem.max_tokens or 0
    rules[kernel.CEILING] = ceiling
    rules[kernel.WINDOW] = min(_WINDOW, num_samples - 1)
    rules[kernel.EXCHANGES] = exchanges
    rules[kernel.MOVES] = moves
    schedule = [seed % (2**61) + 1, num_blocks, hot, _cooling(hot, cold, num_blocks)]
    schedule.append(-(-num_blocks // 16))
    slot = kernel.interleaved([start.encoder, start.llm])
    kernel.anneal(
        kernel.interleaved(job.weight),
        slot,
        kernel.interleaved(job.loads(start)),
        kernel.as_numbers(rules),
        kernel.as_numbers(_thresholds()),
        kernel.as_numbers(schedule),
    )
    places = [int(k) for k in slot]
    end = Start(places[0::2], places[1::2])
    return Start(end.encoder, end.llm, job.score(end))


@lru_cache(maxsize=1)
def _thresholds() -> list[int]:
    """-ln((n + 1/2) / 1024) times 2^16. By decimal arithmetic: equal on every machine."""
    with localcontext() as context:
        context.prec = 20
        return [
            int((-(Decimal(2 * n + 1) / 2048).ln() * 65536).to_integral_value())
            for n in range(1024)
        ]


@lru_cache(maxsize=256)
def _cooling(hot: int, cold: int, num_blocks: int) -> int:
    """Factor per block, times 2^20, that leads from one temperature to the other."""
    with localcontext() as context:
        context.prec = 20
        factor = ((Decimal(cold) / Decimal(hot)).ln() / num_blocks).exp()
        return int((factor * 2**20).to_integral_value())
