"""A microbatch never makes the host wait for the device.

On the meta device there are no values: whatever asks for one, as a host does that waits, raises.
A copy from pageable memory to a device, for which a host waits, too, is not noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.models.batch_check import check_rows
from lightning_entrain.models.entrain_model import gather_features, num_correct
from lightning_entrain.models.tiny import nano_vlm
from tests.models.helpers import make_batch

BATCH = make_batch(([[1, 0], [2]], [[0], [1, 2, 3]]), rows=[0, 1, 2, 3])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_forward_and_backward_ask_the_device_for_nothing(recompute: str) -> None:
    model = nano_vlm(encoder_recompute=recompute, llm_recompute=recompute).to("meta")
    model.scalars["num_correct"] = num_correct
    batch = BATCH.to("meta")
    sizes, replica = batch.sizes, batch.assignment.replicas[0]
    features = []
    for k, samples in enumerate(replica.encoder):
        packing = batch.encoder_packing(0, k)
        hidden = model.encoder_stage(batch.pixels[0, k], packing, start=0, stop=1)
        features.append((samples, model.encoder_stage(hidden, packing, start=1, stop=3)))
    total = torch.zeros((), device="meta")
    for j, row in enumerate(replica.llm):
        logits = model.llm_stage(
            gather_features(row, features, sizes),
            batch.llm_packing(0, j),
            start=0,
            stop=3,
            input_ids=batch.input_ids[0, j],
        )
        num_labels = sum(sizes[i].num_label_tokens for i in row)
        total = total + model.labelled_loss_sum(logits, batch.labels[0, j], num_labels)
        assert model.scalar_sums(logits, batch.labels[0, j])["num_correct"].is_meta
    total.backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_the_meta_device_notices() -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones(3, device="meta")[torch.ones(3, dtype=torch.bool, device="meta")]


def with_rows(**rows: Any) -> PlannedBatch:
    rows = {"pixels": BATCH.pixels, "input_ids": BATCH.input_ids, "labels": BATCH.labels, **rows}
    return PlannedBatch(
        assignment=BATCH.assignment,
        sizes=BATCH.sizes,
        needs=BATCH.needs,
        sample_indices=BATCH.sample_indices,
        **rows,
    )


def test_missing_placeholders_are_found_on_the_host() -> None:
    model = nano_vlm()
    check_rows(BATCH, model.llm.image_token_id)
    wrong = with_rows(input_ids={key: ids + 1 for key, ids in BATCH.input_ids.items()})
    for check in (model, lambda batch: check_rows(batch, model.llm.image_token_id)):
        with pytest.raises(RuntimeMismatchError, match="0 image placeholders"):
            check(wrong)


def test_labels_are_counted_row_by_row() -> None:
    model = nano_vlm()
    labels = {key: row.clone() for key, row in BATCH.labels.items()}
    (first, second) = labels.values()
    second[(second != -100).nonzero()[0]] = -100
    first[(first == -100).nonzero()[0]] = 1  # as many in all
    wrong = with_rows(labels=labels)
    announced = int((BATCH.labels[0, 0] != -100).sum())
    for check in (model, lambda batch: check_rows(batch, model.llm.image_token_id)):
        with pytest.raises(RuntimeMismatchError) as caught:
            check(wrong)
        said = str(caught.value)
        assert f"LLM microbatch 0 of replica 0 has {announced + 1} label tokens" in said
    with pytest.raises(RuntimeMismatchError, match="microbatch 1 of replica 0 has 0 label tokens"):
        check_rows(with_rows(labels={(0, 0): BATCH.labels[0, 0]}), None)
    logits = torch.randn(len(first), 260)
    with pytest.raises(RuntimeMismatchError, match=f"A row has {announced + 1} label tokens"):
        model.labelled_loss_sum(logits, first, announced)


def test_only_labelled_rows_enter_the_loss() -> None:
    model = nano_vlm()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 260, generator=generator, requires_grad=True)
    labels = torch.full((9,), -100)
    labels[[1, 4, 8]] = torch.tensor([3, 200, 7])
    chosen = model.labelled_loss_sum(logits, labels, 3)
    torch.testing.assert_close(chosen, model.loss_sum(logits, labels))
    chosen.backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(1).nonzero().flatten().tolist() == [1, 4, 8]
