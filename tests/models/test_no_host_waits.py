"""A microbatch never makes the host wait for the device.

On the meta device there are no values: whatever asks for one, as a host does that waits, raises.
"""

from __future__ import annotations

import pytest
import torch

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.models.entrain_model import gather_features, num_correct
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.runtime.batch_check import check_tokens
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


def test_missing_placeholders_are_found_on_the_host() -> None:
    model, device = nano_vlm(), torch.device("cuda")
    check_tokens(BATCH, model, device)
    wrong = PlannedBatch(
        assignment=BATCH.assignment,
        sizes=BATCH.sizes,
        needs=BATCH.needs,
        sample_indices=BATCH.sample_indices,
        input_ids={key: ids + 1 for key, ids in BATCH.input_ids.items()},
    )
    with pytest.raises(RuntimeMismatchError, match="0 image placeholders"):
        check_tokens(wrong, model, device)


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
