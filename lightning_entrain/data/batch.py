"""The record a training step receives: one global batch, planned, partly loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_entrain.assign.types import Assignment
from lightning_entrain.workload.sizes import SampleSize, total_label_tokens

if TYPE_CHECKING:
    from lightning_entrain.models.protocol import EncoderPacking, LlmPacking

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class DataNeeds:
    """Which tensors of a global batch a rank works on.

    Attributes:
        pixels: Patches, read by the first encoder stage.
        input_ids: Token ids, read by the first LLM stage.
        labels: Labels, read by the last LLM stage.
        replica: The only replica whose data is loaded; None loads all.
    """

    pixels: bool
    input_ids: bool
    labels: bool
    replica: int | None = None

    @classmethod
    def everything(cls) -> DataNeeds:
        """All tensors of all replicas, as on a single process."""
        return cls(pixels=True, input_ids=True, labels=True, replica=None)

    def covers(self, replica: int) -> bool:
        """Whether that replica's data is loaded."""
        return self.replica is None or self.replica == replica


class PlannedBatch:
    """One global batch, the same on every rank except for the tensors loaded.

    Attributes:
        assignment: Which sample is in which replica and microbatch, by global-batch index.
        sizes: Size of every sample, by global-batch index.
        needs: Which tensors are loaded.
        pixels: Per (replica, encoder microbatch k) one row of patches ``[patches, patch_dim]``,
            float32.
        input_ids: Per (replica, LLM microbatch j) one row of token ids ``[tokens]``, int64.
        labels: Per (replica, LLM microbatch j) one row of labels ``[tokens]``, int64, already
            shifted; ``IGNORE_INDEX`` where a position does not count.
        sample_indices: Index in the dataset of every sample, by global-batch index.
        step_plan: What the strategy's planner made of the assignment ahead of time, or None.

    Microbatches without rows are absent from the three dictionaries. Iterating a batch yields one
    tensor of ``num_samples`` rows and nothing else, from which Lightning infers the batch size.
    """

    def __init__(
        self,
        *,
        assignment: Assignment,
        sizes: Sequence[SampleSize],
        needs: DataNeeds,
        sample_indices: Sequence[int],
        pixels: dict[tuple[int, int], Tensor] | None = None,
        input_ids: dict[tuple[int, int], Tensor] | None = None,
        labels: dict[tuple[int, int], Tensor] | None = None,
        step_plan: Any = None,
    ) -> None:
        self.assignment = assignment
        self.sizes = tuple(sizes)
        self.needs = needs
        self.sample_indices = tuple(sample_indices)
        self.pixels = pixels or {}
        self.input_ids = input_ids or {}
        self.labels = labels or {}
        self.step_plan = step_plan

    @property
    def num_samples(self) -> int:
        """Samples in the global batch, over all replicas."""
        return len(self.sizes)

    @cached_property
    def num_label_tokens(self) -> int:
        """Label tokens in the global batch: the divisor of the loss."""
        return total_label_tokens(self.sizes)

    @property
    def num_tokens(self) -> int:
        """LLM tokens in the global batch, text and vision."""
        return sum(size.num_tokens for size in self.sizes)

    @property
    def num_vision_tokens(self) -> int:
        """Vision tokens in the global batch, after merging."""
        return sum(size.num_vision_tokens for size in self.sizes)

    def encoder_packing(self, replica: int, microbatch: int) -> EncoderPacking:
        """Grids of the images in an encoder microbatch, in row order."""
        from lightning_entrain.models.protocol import EncoderPacking

        entry = self.assignment.replicas[replica].encoder[microbatch]
        return EncoderPacking(grids=tuple(grid for i in entry for grid in self.sizes[i].grids))

    def llm_packing(self, replica: int, microbatch: int) -> LlmPacking:
        """Tokens per sample of an LLM microbatch, in row order."""
        from lightning_entrain.models.protocol import LlmPacking

        entry = self.assignment.replicas[replica].llm[microbatch]
        return LlmPacking(sample_lengths=tuple(self.sizes[i].num_tokens for i in entry))

    def to(self, device: Any, **kwargs: Any) -> PlannedBatch:
        """A copy with its tensors on another device; arguments as of ``Tensor.to``."""
        return self._map(lambda tensor: tensor.to(device, **kwargs))

    def pin_memory(self) -> PlannedBatch:
        """A copy with its tensors in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> PlannedBatch:
        return PlannedBatch(
            assignment=self.assignment,
            sizes=self.sizes,
            needs=self.needs,
            sample_indices=self.sample_indices,
            step_plan=self.step_plan,
            pixels={key: change(tensor) for key, tensor in self.pixels.items()},
            input_ids={key: change(tensor) for key, tensor in self.input_ids.items()},
            labels={key: change(tensor) for key, tensor in self.labels.items()},
        )

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.empty(self.num_samples, 0)

    def __repr__(self) -> str:
        return (
            f"PlannedBatch({self.num_samples} samples, {self.num_tokens} tokens, "
            f"{len(self.assignment.replicas)} replicas, policy {self.assignment.policy!r})"
        )
