"""The loss and its gradients do not depend on how samples are grouped into microbatches."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.entrain_model import EntrainModel, gather_features, num_correct
from lightning_entrain.models.projector import MlpProjector
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.workload.sizes import SampleSize

from .helpers import make_batch, reference_loss, relative

GROUPINGS = {
    "one microbatch": [([[0, 1, 2, 4, 5, 6]], [range(8)])],
    "one sample each": [
        ([[i] if i not in (3, 7) else [] for i in range(8)], [[i] for i in range(8)])
    ],
    "a microbatch without an image": [([[0, 1, 2, 4], [], [5, 6]], [[0, 1, 2, 4], [3, 7], [5, 6]])],
    "other order in the LLM": [([[6, 0, 2], [5, 1, 4]], [[2, 3, 6, 0], [1, 4, 7, 5]])],
    "deferral": [([[0, 1, 2], [4, 5], [6]], [[2], [1, 4, 3, 0], [6, 7, 5]])],
    "everything deferred": [([[5, 0], [1, 2, 4, 6], []], [[], [0, 5, 7], [6, 4, 3, 2, 1]])],
    "empty between": [([[0, 1], [], [], [2, 4, 5, 6]], [[1], [0, 3], [], [6, 2, 4, 5, 7]])],
    "two replicas of unequal length": [
        ([[4, 1], [0]], [[1, 3], [0, 4]]),
        ([[2], [5], [6]], [[2, 7], [5], [6]]),
    ],
}


def gradients(model: EntrainModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(params=["merger", "projector"])
def model(request) -> EntrainModel:
    made = nano_vlm()
    projector = MlpProjector(24, 24, 10) if request.param == "projector" else None
    return EntrainModel(made.encoder, made.llm, projector, scalars={"num_correct": num_correct})


@pytest.mark.parametrize("name", GROUPINGS)
def test_equal_to_hugging_face_sample_by_sample(model, name):
    batch = make_batch(*GROUPINGS[name])
    expected = reference_loss(model, range(8))
    expected_gradients = gradients(model, expected)
    loss = model(batch)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for key, found in gradients(model, loss).items():
        assert relative(found, expected_gradients[key]) < 1e-5, key


def test_only_text(model):
    batch = make_batch(([[], []], [[0], [1]]), rows=[3, 7])
    assert not batch.pixels
    loss = model(batch)
    assert loss.item() == pytest.approx(reference_loss(model, [3, 7]).item(), rel=1e-6)


def test_scalars_are_summed_over_all_microbatches(model):
    model(make_batch(*GROUPINGS["one microbatch"]))
    (one,) = model.scalars_out.values()
    model(make_batch(*GROUPINGS["two replicas of unequal length"]))
    assert model.scalars_out == {"num_correct": one}
    assert one.dtype == torch.float64
    model.scalars = {
        "num_correct": lambda logits, labels: (labels != -100).sum(),
        "tokens": lambda logits, labels: torch.tensor(len(logits)),
    }
    batch = make_batch(*GROUPINGS["deferral"])
    model(batch)
    assert int(model.scalars_out["num_correct"]) == batch.num_label_tokens
    assert int(model.scalars_out["tokens"]) == batch.num_tokens


def test_num_correct_counts_labelled_positions_only():
    logits = torch.eye(4)
    assert int(num_correct(logits, torch.tensor([0, 2, -100, 3]))) == 2


def test_no_label_gives_zero_with_a_graph(model):
    batch = make_batch(([[0, 1, 2]], [[0, 1, 2]]), rows=[0, 1, 2])
    for labels in batch.labels.values():
        labels.fill_(-100)
    batch.sizes = tuple(
        SampleSize(grids=s.grids, num_text_tokens=s.num_text_tokens, num_label_tokens=0)
        for s in batch.sizes
    )
    loss = model(batch)
    assert loss.item() == 0.0
    assert all(not g.any() for g in gradients(model, loss).values())


def test_labels_that_are_not_those_announced(model):
    batch = make_batch(*GROUPINGS["deferral"])
    batch.labels[0, 1][:] = -100
    with pytest.raises(RuntimeMismatchError, match=r"microbatch 1 of replica 0 has 0 label tokens"):
        model(batch)


def test_loss_of_half_precision_logits_is_computed_in_fp32(model):
    logits = (torch.randn(50, 30) * 8).bfloat16().requires_grad_()
    labels = torch.randint(0, 30, (50,))
    labels[::3] = -100
    loss = model.loss_sum(logits, labels)
    kept = labels != -100
    exact = torch.nn.functional.cross_entropy(
        logits.detach()[kept].double(), labels[kept], reduction="sum"
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(exact), rel=1e-6)
    loss.backward()
    assert not logits.grad[~kept].any()


def test_gather_features_orders_and_selects():
    sizes = [
        SampleSize(grids=((1, 2, 2 * n),) if n else (), num_text_tokens=1, num_label_tokens=1)
        for n in (2, 1, 0, 3)
    ]
    first = torch.tensor([[30.0], [31], [32], [10]])
    second = torch.tensor([[0.0], [1]])
    parts = [((3, 1), first), ((0,), second)]
    assert gather_features((0, 2, 3), parts, sizes).flatten().tolist() == [0, 1, 30, 31, 32]
    assert gather_features((1, 0), parts, sizes).flatten().tolist() == [10, 0, 1]
    assert gather_features((2,), parts, sizes) is None
    assert gather_features((2,), [], sizes) is None
    assert gather_features((3, 2, 1), parts[:1], sizes) is first
    with pytest.raises(RuntimeMismatchError, match="Sample 0"):
        gather_features((3, 0), parts[:1], sizes)
    with pytest.raises(RuntimeMismatchError, match=r"returned 4 rows.*3 vision tokens"):
        gather_features((3,), [((3,), first)], sizes)


def test_engine_takes_the_place_of_the_loop(model):
    batch = make_batch(*GROUPINGS["deferral"])
    expected = model(batch).item()
    seen: list[PlannedBatch] = []

    class Engine(torch.nn.Linear):
        def forward(self, batch: PlannedBatch) -> torch.Tensor:
            seen.append(batch)
            return torch.tensor(7.0)

    names = list(model.state_dict())
    model.attach_engine(Engine(1, 1))
    assert model(batch).item() == 7.0
    assert seen == [batch]
    assert list(model.state_dict()) == names
    assert copy.deepcopy(model)(batch).item() == expected
    model.detach_engine()
    assert model(batch).item() == expected


def test_boundary_columns_and_sizes_that_do_not_fit():
    made = nano_vlm()
    assert made.boundary_columns(2, 3) == (16, 24, 24, 24)
    assert made.boundary_columns(1, 1) == (24,)
    wide = nano_vlm()
    wide.llm.hidden_size = 32
    with pytest.raises(ConfigError, match=r"24 columns.*32"):
        EntrainModel(made.encoder, wide.llm)
    with pytest.raises(ConfigError, match=r"takes 10 columns.*24"):
        EntrainModel(made.encoder, made.llm, MlpProjector(10, 24))


def test_features_wait_for_one_microbatch_only(model):
    """What is encoded in k is gone when k+2 is decoded."""
    alive: list[int] = []
    stage = model.encoder_stage

    def watched(*args, **kwargs):
        output = stage(*args, **kwargs)
        weakref.finalize(output, alive.remove, id(output))
        alive.append(id(output))
        return output

    model.encoder_stage = watched
    most: list[int] = []
    llm_stage = model.llm_stage
    model.llm_stage = lambda *a, **k: (most.append(len(alive)), llm_stage(*a, **k))[1]
    with torch.no_grad():
        model(make_batch(*GROUPINGS["one sample each"]))
    assert max(most) <= 2
