"""What was loaded against what was planned, while it is still on the host."""

from __future__ import annotations

import torch

from lightning_entrain.data.batch import IGNORE_INDEX, PlannedBatch
from lightning_entrain.models.entrain_model import EntrainModel, check_label_count
from lightning_entrain.models.protocol import check_placeholders
from lightning_entrain.workload.sizes import total_label_tokens


def check_labels(batch: PlannedBatch) -> None:
    """Check the number of labels of the replicas that are loaded.

    Raises:
        RuntimeMismatchError: If the samples' sizes announced another one.
    """
    if not batch.needs.labels:
        return
    found = sum(int((row != IGNORE_INDEX).sum()) for row in batch.labels.values())
    announced = sum(
        total_label_tokens([batch.sizes[index] for index in entry])
        for r, replica in enumerate(batch.assignment.replicas)
        if batch.needs.covers(r)
        for entry in replica.llm
    )
    check_label_count(found, announced)


def check_tokens(batch: PlannedBatch, model: EntrainModel, device: torch.device) -> None:
    """Check that token ids have a placeholder for every vision feature to come.

    On the host the model sees to that itself; elsewhere it could only do so by waiting.

    Raises:
        RuntimeMismatchError: If a row of token ids has more or fewer.
    """
    image_token_id = getattr(model.llm, "image_token_id", None)
    if device.type == "cpu" or image_token_id is None:
        return
    for (r, j), row in batch.input_ids.items():
        if row.device.type == "cpu":
            entry = batch.assignment.replicas[r].llm[j]
            num_features = sum(batch.sizes[index].num_vision_tokens for index in entry)
            check_placeholders(int((row == image_token_id).sum()), num_features, image_token_id)
