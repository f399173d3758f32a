"""What was loaded against what the samples' sizes announced, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_entrain.data.batch import IGNORE_INDEX
from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.models.protocol import check_placeholders
from lightning_entrain.workload.sizes import total_label_tokens

if TYPE_CHECKING:
    from lightning_entrain.data.batch import PlannedBatch


def check_rows(batch: PlannedBatch, image_token_id: int | None) -> None:
    """Check each loaded row's labels, and its placeholders for the vision features to come.

    Meant for a batch on the host. For rows that lie on a device already, the host waits once.

    Args:
        batch: The batch.
        image_token_id: Of the placeholders; None if the model has none.

    Raises:
        RuntimeMismatchError: If a row has more or fewer of either.
    """
    checks: list[tuple[Tensor, Callable[[int], None]]] = []
    for r, j, row, samples in _rows(batch, batch.labels, needed=batch.needs.labels):
        announced = total_label_tokens([batch.sizes[index] for index in samples])
        counted = (
            (row != IGNORE_INDEX).sum() if row is not None else torch.zeros((), dtype=torch.long)
        )
        checks.append((counted, _expecting(announced, f"LLM microbatch {j} of replica {r}")))
    for _, _, row, samples in _rows(batch, batch.input_ids, needed=False):
        if row is not None and image_token_id is not None:
            features = sum(batch.sizes[index].num_vision_tokens for index in samples)
            checks.append(((row == image_token_id).sum(), _places(features, image_token_id)))
    devices = {counted.device for counted, _ in checks}
    for device in devices:
        there = [check for check in checks if check[0].device == device]
        found = torch.stack([counted for counted, _ in there]).tolist()
        for (_, check), number in zip(there, found, strict=True):
            check(number)


def check_label_count(found: int, announced: int, where: str) -> None:
    """Raise ``RuntimeMismatchError`` if the labels loaded are not those the sizes announced."""
    if found != announced:
        raise RuntimeMismatchError(
            f"{where} has {found} label tokens",
            limit=f"the {announced} that its samples' sizes announced",
            remedy="rebuild the size index: the data or the tokenizer changed under it",
        )


def _rows(
    batch: PlannedBatch, loaded: Mapping[tuple[int, int], Tensor], *, needed: bool
) -> Iterator[tuple[int, int, Tensor | None, tuple[int, ...]]]:
    for r, replica in enumerate(batch.assignment.replicas):
        for j, samples in enumerate(replica.llm):
            row = loaded.get((r, j))
            if row is not None or (needed and batch.needs.covers(r)):
                yield r, j, row, tuple(samples)


def _expecting(announced: int, where: str) -> Callable[[int], None]:
    return lambda found: check_label_count(found, announced, where)


def _places(num_features: int, image_token_id: int) -> Callable[[int], None]:
    return lambda found: check_placeholders(found, num_features, image_token_id)
