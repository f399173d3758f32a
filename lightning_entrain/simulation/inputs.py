"""What a simulation is given: options of a policy, the machine, and global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lightning_entrain.assign.registry import POLICIES
from lightning_entrain.errors import ConfigError
from lightning_entrain.schedule.simulate import Link
from lightning_entrain.workload.shapes import FloatArray
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable

SCHEDULES = ("1f1b", "eager", "dip", "auto")
"""``1f1b``: plain. ``eager``: the fastest of 1F1B with deferral, split-backward and eager forward.
``dip``: three phases over colocated stages. ``auto``: the fastest of all that fit the memory."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How one policy is run.

    Attributes:
        schedule: One of :data:`SCHEDULES`.
        max_lag: 1 allows deferral.
        limit_by_heaviest: Use no more microbatches than total / heaviest encoder cost.
        num_microbatches: K, several to choose from by simulation, or None for the plan's.
        ramp: Also simulate lighter first microbatches, and take what is faster (``joint``).
        num_groups: Sub-microbatches per microbatch (``dip``).
        num_steps: Orders that the automatic choice tries each step.
        template_steps: Orders that are tried once per plan, for the order that every step starts
            from; 0 for no such search, and then no ramp. 100,000 take 1 to 4 s.
        stages: ``"encoder:llm"`` stages instead of the plan's.
    """

    schedule: str = "1f1b"
    max_lag: int = 0
    limit_by_heaviest: bool = True
    num_microbatches: int | tuple[int, ...] | None = None
    ramp: bool = False
    num_groups: int = 2
    num_steps: int = 1000
    template_steps: int = 100_000
    stages: str | None = None

    def check(self, policy: str) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: Naming the option.
        """
        name = f"policy_options.{policy}"
        if policy not in POLICIES:
            raise ConfigError(f"policy {policy!r}", limit=f"some of {', '.join(POLICIES)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"{name}.schedule is {self.schedule!r}", limit=f"one of {', '.join(SCHEDULES)}"
            )
        if self.ramp and policy != "joint":
            raise ConfigError(f"{name}.ramp is true", limit="only joint can aim at a ramp")
        if self.template_steps < 0 or (self.ramp and not self.template_steps):
            raise ConfigError(
                f"{name}.template_steps is {self.template_steps}",
                limit="at least 0, and above 0 for a ramp",
            )
        counts = self.num_microbatches
        for count in counts if isinstance(counts, tuple) else (counts or 1,):
            if count < 1:
                raise ConfigError(f"{name}.num_microbatches is {count}", limit="at least 1")

    def counts(self, default: int) -> tuple[int, ...]:
        """Numbers of microbatches to choose from."""
        if self.num_microbatches is None:
            return (default,)
        counts = self.num_microbatches
        return counts if isinstance(counts, tuple) else (counts,)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What every policy runs under.

    Attributes:
        num_replicas: Data-parallel replicas.
        num_microbatches: The plan's K.
        link: Transfer times; None for none.
        overhead: Added to every action, as a part of the mean F.
        max_live: Memory per rank in mean microbatches; None for one more than there are ranks.
        memory_gib: Memory per rank for states and activations; None for no such cap.
        seed: Of the searches.
    """

    num_replicas: int
    num_microbatches: int
    link: Link | None = None
    overhead: float = 0.0
    max_live: float | None = None
    memory_gib: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Samples of one step.

    Attributes:
        encoder_ms: F, I and W of each sample in the whole encoder, ``[num_samples]``.
        llm_ms: Likewise in the LLM.
        table: Their sizes.
    """

    encoder_ms: FloatArray
    llm_ms: FloatArray
    table: SizeTable

    @property
    def sizes(self) -> Sequence[SampleSize]:
        """What transfers need of the sizes."""
        columns = (self.table.num_patches, self.table.num_vision_tokens, self.table.num_text_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return cast(Sequence[SampleSize], [_Rows(*row) for row in rows])


@dataclass(frozen=True)
class _Rows:
    """The counts of a sample whose patch grids are not kept."""

    num_patches: int
    num_vision_tokens: int
    num_text_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_vision_tokens + self.num_text_tokens


def batches(
    table: SizeTable,
    encoder_ms: FloatArray,
    llm_ms: FloatArray,
    *,
    batch_size: int,
    num_batches: int,
    seed: int,
) -> list[GlobalBatch]:
    """Draw global batches: a shuffled pass over the table, and further passes if it is short."""
    generator = np.random.default_rng(seed)
    needed = batch_size * num_batches
    passes = -(-needed // len(table))
    order = np.concatenate([generator.permutation(len(table)) for _ in range(passes)])[:needed]
    return [
        GlobalBatch(encoder_ms=encoder_ms[part], llm_ms=llm_ms[part], table=table.take(part))
        for part in (order[b * batch_size : (b + 1) * batch_size] for b in range(num_batches))
    ]


def parse_splits(text: str) -> tuple[int, int]:
    """``"5:3"`` as numbers.

    Raises:
        ConfigError: If it is something else.
    """
    parts = text.split(":")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"stages is {text!r}", limit="encoder:llm stages, such as 5:3")
    encoder, llm = (int(part) for part in parts)
    return encoder, llm
