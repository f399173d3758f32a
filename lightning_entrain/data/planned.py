"""A dataset whose items are planned global batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Dataset

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.assign.registry import POLICIES
from lightning_entrain.assign.types import Assignment
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.collate import build_batch
from lightning_entrain.data.dataset import SizedDataset
from lightning_entrain.data.shape import BatchShape as BatchShape
from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.sizes import SampleSize

Costs = Callable[[Sequence[SampleSize]], tuple[Sequence[float], Sequence[float]]]
"""Costs per sample in encoder and LLM, each in a fixed unit. Must be picklable."""


def count_rows(sizes: Sequence[SampleSize]) -> tuple[list[float], list[float]]:
    """Patches and tokens: costs that need no model."""
    return [float(s.num_patches) for s in sizes], [float(s.num_tokens) for s in sizes]


class Policy(Protocol):
    """Decides which sample of a global batch goes where. Must be picklable."""

    def __call__(
        self,
        encoder_cost: Sequence[float],
        llm_cost: Sequence[float],
        has_images: Sequence[bool],
        num_replicas: int,
        num_microbatches: int,
        seed: int,
    ) -> Assignment:
        """Assign the samples.

        Args:
            encoder_cost: Per sample its work in the encoder, in any fixed unit.
            llm_cost: Per sample its work in the LLM.
            has_images: Per sample whether the encoder has work with it.
            num_replicas: Data-parallel replicas.
            num_microbatches: Most microbatches per replica.
            seed: Of whatever is random.
        """
        ...


def fixed_policy(
    encoder_cost: Sequence[float],
    llm_cost: Sequence[float],
    has_images: Sequence[bool],
    num_replicas: int,
    num_microbatches: int,
    seed: int,
) -> Assignment:
    """Sampler order, whatever the costs; see :func:`assign_fixed`."""
    return assign_fixed(has_images, num_replicas=num_replicas, num_microbatches=num_microbatches)


@dataclass(frozen=True)
class NamedPolicy:
    """A policy of :func:`assign_samples`, with costs as they are given.

    Attributes:
        name: One of the registry's names.
        max_lag: 1 lets LLM work lag by one microbatch, 0 forbids it; None leaves deferral to the
            policy that is defined by it (``entrain``).
    """

    name: str
    max_lag: int | None = None

    def __call__(
        self,
        encoder_cost: Sequence[float],
        llm_cost: Sequence[float],
        has_images: Sequence[bool],
        num_replicas: int,
        num_microbatches: int,
        seed: int,
    ) -> Assignment:
        """Assign the samples; those without images have encoder cost 0."""
        return assign_samples(
            encoder_cost,
            llm_cost,
            num_replicas=num_replicas,
            num_microbatches=num_microbatches,
            policy=self.name,
            seed=seed,
            max_lag=int(self.name == "entrain") if self.max_lag is None else self.max_lag,
            # The incomplete last batch of a validation cannot always be shared out evenly.
            equal_counts=len(llm_cost) % num_replicas == 0,
        )


def resolve_policy(assignment: str | Policy, max_lag: int | None = None) -> Policy:
    """A policy by its name; a function is taken as it is.

    Args:
        assignment: Name or function.
        max_lag: See :class:`NamedPolicy`.

    Raises:
        ConfigError: If no policy has that name.
    """
    if callable(assignment):
        return assignment
    if assignment not in POLICIES:
        raise ConfigError(
            f"assignment is {assignment!r}",
            limit=f"one of {', '.join(sorted(POLICIES))}, or a function",
            remedy="set assignment=fixed",
        )
    if max_lag not in (None, 0, 1):
        raise ConfigError(f"max_lag is {max_lag}", limit="0, 1, or null for the policy's own")
    return fixed_policy if assignment == "fixed" else NamedPolicy(assignment, max_lag)


class GlobalBatches(Dataset[PlannedBatch]):
    """Planned global batches of a part of a dataset.

    Asked for a list of positions it plans and loads that global batch; asked for one number it
    takes the so-many-th run of positions.

    Args:
        dataset: All samples.
        part: Indices in the dataset of the samples in this part; positions count these.
        shape: How a global batch is cut.
        policy: Decides which sample goes where.
        costs: Costs of samples in encoder and LLM; None counts patches and tokens.
        plan_step: Called with each assignment, its sizes and ``train=``; what it returns travels
            with the batch as ``step_plan``.
        train: Whether the batches are for training.
        num_replicas: Data-parallel replicas.
        needs: What this rank loads.
        seed: Handed to the policy.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        part: Sequence[int],
        *,
        shape: BatchShape,
        policy: Policy = fixed_policy,
        costs: Costs | None = None,
        plan_step: Callable[..., Any] | None = None,
        train: bool = True,
        num_replicas: int = 1,
        needs: DataNeeds | None = None,
        seed: int = 0,
    ) -> None:
        shape.check_replicas(num_replicas)
        self.dataset = dataset
        self.part = part
        self.shape = shape
        self.policy = policy
        self.costs = costs or count_rows
        self.plan_step = plan_step
        self.train = train
        self.num_replicas = num_replicas
        self.needs = needs or DataNeeds.everything()
        self.seed = seed

    def __len__(self) -> int:
        """Global batches, an incomplete last one included."""
        return -(-len(self.part) // self.shape.global_batch_size)

    def __getitem__(self, positions: int | Sequence[int]) -> PlannedBatch:
        if isinstance(positions, int):
            start = positions * self.shape.global_batch_size
            positions = range(start, min(start + self.shape.global_batch_size, len(self.part)))
        indices = [self.part[position] for position in positions]
        sizes = [self.dataset.sizes[index] for index in indices]
        has_images = [size.has_images for size in sizes]
        encoder_cost, llm_cost = self.costs(sizes)
        assignment = self.policy(
            encoder_cost,
            llm_cost,
            has_images,
            self.num_replicas,
            self.shape.microbatches(len(indices), self.num_replicas),
            self.seed,
        )
        text_only = frozenset(i for i, has in enumerate(has_images) if not has)
        assignment.validate(len(indices), text_only=text_only)
        if assignment.encoder_cost is None:
            assignment = assignment.with_costs(encoder_cost, llm_cost)
        batch = build_batch(self.dataset, indices, assignment, sizes, self.needs)
        if self.plan_step is not None:
            batch.step_plan = self.plan_step(assignment, batch.sizes, train=self.train)
        return batch
