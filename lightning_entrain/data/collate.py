"""Packing: samples of a microbatch become one row of patches and one row of tokens, unpadded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_entrain.assign.types import Assignment
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.dataset import TokenRow
from lightning_entrain.workload.sizes import SampleSize


class Loader(Protocol):
    """Loads the parts of a sample, as :class:`SizedDataset` does."""

    def load_pixels(self, index: int) -> Tensor:
        """Patches ``[patches, patch_dim]``."""
        ...

    def load_tokens(self, index: int) -> TokenRow:
        """Token ids and labels, ``[tokens]`` each."""
        ...


def build_batch(
    source: Loader,
    sample_indices: Sequence[int],
    assignment: Assignment,
    sizes: Sequence[SampleSize],
    needs: DataNeeds,
) -> PlannedBatch:
    """Load and pack what a rank needs of a global batch.

    Args:
        source: Loads samples by dataset index.
        sample_indices: Dataset index of every sample, by global-batch index.
        assignment: Which sample goes where, in global-batch indices.
        sizes: Size of every sample, by global-batch index.
        needs: Which tensors to load. Nothing else is read.

    Returns:
        The batch. An encoder microbatch's row holds its samples' patches in the assignment's
        order, an LLM microbatch's row their tokens; positions restart with every sample.

    Raises:
        SampleError: If a sample cannot be loaded.
    """
    pixels: dict[tuple[int, int], Tensor] = {}
    input_ids: dict[tuple[int, int], Tensor] = {}
    labels: dict[tuple[int, int], Tensor] = {}
    for r, replica in enumerate(assignment.replicas):
        if not needs.covers(r):
            continue
        for k, entry in enumerate(replica.encoder):
            if needs.pixels and entry:
                pixels[r, k] = torch.cat([source.load_pixels(sample_indices[i]) for i in entry])
        for j, entry in enumerate(replica.llm):
            if not (needs.input_ids or needs.labels) or not entry:
                continue
            rows = [source.load_tokens(sample_indices[i]) for i in entry]
            if needs.input_ids:
                input_ids[r, j] = torch.cat([row.input_ids for row in rows])
            if needs.labels:
                labels[r, j] = torch.cat([row.labels for row in rows])
    return PlannedBatch(
        assignment=assignment,
        sizes=sizes,
        needs=needs,
        sample_indices=sample_indices,
        pixels=pixels,
        input_ids=input_ids,
        labels=labels,
    )
