from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.collate import build_batch
from lightning_entrain.data.dataset import SizedDataset
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.models.entrain_model import EntrainModel

Lists = Sequence[Sequence[int]]


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).detach().norm() / expected.detach().norm())


@cache
def dataset() -> SizedDataset:
    """Eight samples of very different sizes; 3 and 7 have no image."""
    found = synthetic_dataset(8, seed=3, text_only_fraction=0.25, max_side=220)
    assert [i for i, size in enumerate(found.sizes) if not size.grids] == [3, 7]
    return found


def make_batch(*replicas: tuple[Lists, Lists], rows: Sequence[int] = range(8)) -> PlannedBatch:
    """A batch of these rows of the data set: per replica the encoder and the LLM microbatches."""
    assignment = Assignment(
        replicas=tuple(
            ReplicaAssignment(
                encoder=tuple(map(tuple, encoder)), llm=tuple(tuple(row) for row in llm)
            )
            for encoder, llm in replicas
        ),
        policy="test",
    )
    sizes = [dataset().sizes[i] for i in rows]
    text_only = frozenset(i for i, size in enumerate(sizes) if not size.grids)
    assignment.validate(len(rows), text_only=text_only)
    return build_batch(dataset(), rows, assignment, sizes, DataNeeds.everything())


def reference_loss(model: EntrainModel, indices: Sequence[int]) -> Tensor:
    """Mean loss with Hugging Face's own forward, one sample at a time."""
    vision, text = model.encoder.hugging_face_model, model.llm.hugging_face_model
    total, num_labels = torch.zeros(()), 0
    for index in indices:
        row = dataset().load_tokens(index)
        embeds = model.llm.model.embed_tokens(row.input_ids)
        grids = dataset().sizes[index].grids
        if grids:
            features = vision(dataset().load_pixels(index), torch.tensor(grids)).pooler_output
            if model.projector is not None:
                features = model.projector(features)
            embeds = torch.cat([features, embeds[len(features) :]])
        logits = text(inputs_embeds=embeds[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, row.labels, ignore_index=-100, reduction="sum")
        num_labels += int((row.labels != -100).sum())
    return total / num_labels
