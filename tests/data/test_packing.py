"""What lands where in the packed rows of a global batch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.data.batch import IGNORE_INDEX, DataNeeds, PlannedBatch
from lightning_entrain.data.collate import build_batch
from lightning_entrain.data.dataset import SizedDataset, encode_turns, measure_sample
from lightning_entrain.data.images import image_patches
from lightning_entrain.data.records import Turn
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.errors import SampleError
from lightning_entrain.workload.image_rule import ImageRule
from tests.data.helpers import ListSource, picture, turns

IMAGE, END, USER, ASSISTANT = range(4)


def dataset_of(*samples: tuple[tuple[bytes, ...], tuple[Turn, ...]]) -> SizedDataset:
    source, tokenizer, rule = ListSource(samples), ByteTokenizer(), ImageRule()
    sizes = [measure_sample(source, i, tokenizer, rule) for i in range(len(samples))]
    return SizedDataset(source, tokenizer, rule, sizes)


def letters(text: str) -> list[int]:
    return [ord(letter) + 4 for letter in text]


def test_a_row_holds_placeholders_prompt_answer_and_end() -> None:
    dataset = dataset_of(((picture(56, 56),), turns("ab|xyz")))
    row = dataset.load_tokens(0)
    assert row.input_ids.tolist() == [
        *[IMAGE] * 4,
        *[USER, *letters("ab"), ASSISTANT],
        *[*letters("xyz"), END],
    ]
    ignored = [IGNORE_INDEX] * 7  # the last marker of the prompt predicts the first letter
    assert row.labels.tolist() == [*ignored, *letters("xyz"), END, IGNORE_INDEX]
    size = dataset.sizes[0]
    assert (size.num_text_tokens, size.num_label_tokens, size.num_tokens) == (8, 4, 12)


def test_every_answer_of_a_conversation_is_predicted_and_no_prompt() -> None:
    dataset = dataset_of(((), turns("a|b", "c|de")))
    row = dataset.load_tokens(0)
    assert row.input_ids.tolist() == [
        *[USER, *letters("a"), ASSISTANT, *letters("b"), END],
        *[USER, *letters("c"), ASSISTANT, *letters("de"), END],
    ]
    i = IGNORE_INDEX
    assert row.labels.tolist() == [i, i, *letters("b"), END, i, i, i, *letters("de"), END, i]


def test_labels_are_as_many_as_the_sizes_say() -> None:
    dataset = synthetic_dataset(20, seed=3)
    for index, size in enumerate(dataset.sizes):
        row = dataset.load_tokens(index)
        assert len(row.input_ids) == len(row.labels) == size.num_tokens
        assert int((row.labels != IGNORE_INDEX).sum()) == size.num_label_tokens
        assert int((row.input_ids == IMAGE).sum()) == size.num_vision_tokens
        assert len(dataset.load_pixels(index)) == size.num_patches


def test_rows_are_packed_in_the_order_of_the_assignment() -> None:
    dataset = synthetic_dataset(12, seed=1)
    indices = [7, 2, 9, 3, 11]
    sizes = [dataset.sizes[i] for i in indices]
    seen = [i for i, size in enumerate(sizes) if size.has_images]
    assert len(seen) == 4
    # Sample seen[1] is deferred: encoded in microbatch 0, decoded in 1.
    text_only = next(i for i in range(5) if i not in seen)
    replica = ReplicaAssignment(
        encoder=((seen[1], seen[0]), (seen[3], seen[2]), ()),
        llm=((seen[0],), (seen[2], text_only, seen[1], seen[3]), ()),
    )
    assignment = Assignment(replicas=(replica,), policy="by hand")
    assignment.validate(5, text_only=frozenset([text_only]))
    batch = build_batch(dataset, indices, assignment, sizes, DataNeeds.everything())

    assert set(batch.pixels) == {(0, 0), (0, 1)}
    assert set(batch.input_ids) == set(batch.labels) == {(0, 0), (0, 1)}
    for k in (0, 1):
        parts = [dataset.load_pixels(indices[i]) for i in replica.encoder[k]]
        torch.testing.assert_close(batch.pixels[0, k], torch.cat(parts), rtol=0, atol=0)
        grids = batch.encoder_packing(0, k).grids
        assert grids == tuple(grid for i in replica.encoder[k] for grid in sizes[i].grids)
    for j in (0, 1):
        rows = [dataset.load_tokens(indices[i]) for i in replica.llm[j]]
        assert batch.input_ids[0, j].tolist() == [x for row in rows for x in row.input_ids.tolist()]
        assert batch.labels[0, j].tolist() == [x for row in rows for x in row.labels.tolist()]
        lengths = batch.llm_packing(0, j).sample_lengths
        assert lengths == tuple(sizes[i].num_tokens for i in replica.llm[j])
    assert batch.llm_packing(0, 2).sample_lengths == ()
    assert batch.sample_indices == (7, 2, 9, 3, 11)
    assert batch.num_tokens == sum(size.num_tokens for size in sizes)
    assert batch.num_vision_tokens == sum(size.num_vision_tokens for size in sizes)
    total = sum(int((labels != IGNORE_INDEX).sum()) for labels in batch.labels.values())
    assert batch.num_label_tokens == total


def planned(needs: DataNeeds, dataset: SizedDataset | None = None) -> PlannedBatch:
    dataset = dataset or synthetic_dataset(8)
    sizes = list(dataset.sizes)
    assignment = assign_fixed(
        [size.has_images for size in sizes], num_replicas=2, num_microbatches=2
    )
    return build_batch(dataset, range(8), assignment, sizes, needs)


@pytest.mark.parametrize("part", ["pixels", "input_ids", "labels"])
@pytest.mark.parametrize("replica", [None, 0, 1])
def test_only_what_is_needed_is_loaded(part: str, replica: int | None) -> None:
    nothing = DataNeeds(pixels=False, input_ids=False, labels=False, replica=replica)
    batch = planned(replace(nothing, **{part: True}))
    loaded = {name: getattr(batch, name) for name in ("pixels", "input_ids", "labels")}
    rows = loaded.pop(part)
    assert {r for r, _ in rows} == ({0, 1} if replica is None else {replica})
    assert all(not other for other in loaded.values())
    assert batch.num_label_tokens == planned(DataNeeds.everything()).num_label_tokens


def test_a_rank_of_the_llm_opens_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = synthetic_dataset(8)

    def refuse(index: int) -> tuple[bytes, ...]:
        raise AssertionError("an image was read")

    monkeypatch.setattr(dataset.source, "images", refuse)
    needs = DataNeeds(pixels=False, input_ids=True, labels=True)
    assert planned(needs, dataset).input_ids
    with pytest.raises(AssertionError, match="an image was read"):
        planned(DataNeeds.everything(), dataset)


def test_a_rank_of_the_encoder_reads_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = synthetic_dataset(8)
    monkeypatch.setattr(dataset.source, "texts", None)
    assert planned(DataNeeds(pixels=True, input_ids=False, labels=False), dataset).pixels


def test_lightning_finds_the_batch_size_and_moves_the_batch() -> None:
    batch = planned(DataNeeds.everything())
    assert extract_batch_size(batch) == 8
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PlannedBatch)
    tensors = [*moved.pixels.values(), *moved.input_ids.values(), *moved.labels.values()]
    assert len(tensors) == 12
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.assignment is batch.assignment
    assert all(tensor.device.type == "cpu" for tensor in batch.pixels.values())


def test_batches_and_datasets_survive_pickling() -> None:
    batch = planned(DataNeeds.everything())
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.assignment.digest() == batch.assignment.digest()
    assert copy.sizes == batch.sizes
    assert all(torch.equal(copy.pixels[key], batch.pixels[key]) for key in batch.pixels)
    dataset = pickle.loads(pickle.dumps(synthetic_dataset(4)))
    assert len(dataset.load_pixels(0)) == dataset.sizes[0].num_patches


@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        ((), "has no text"),
        (turns("ask| \n"), r"assistant text of turn 0 is empty \(' \\n'\)"),
        (turns("a|b", "|c"), "user text of turn 1 is empty"),
    ],
)
def test_an_empty_text_is_named(conversation: tuple[Turn, ...], words: str) -> None:
    with pytest.raises(SampleError, match=f"Sample 1 of list: .*{words}.*on_bad_sample=skip"):
        dataset_of(((), turns("a|b")), ((), conversation))


def test_text_that_spells_a_placeholder_is_refused_where_a_tokenizer_parses_it() -> None:
    class Naive(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [IMAGE if letter == "#" else ord(letter) + 4 for letter in text]

    with pytest.raises(SampleError, match="stands for a vision token"):
        encode_turns(turns("a#|b"), Naive())


def test_data_that_changed_since_it_was_measured_is_noticed() -> None:
    dataset = dataset_of(((picture(56, 56),), turns("a|b")))
    dataset.source.samples[0] = ((picture(560, 56),), turns("a|bc"))
    with pytest.raises(SampleError, match="Sample 0 of list has 160 patches, but 16 when"):
        dataset.load_pixels(0)
    with pytest.raises(SampleError, match="Sample 0 of list has 6 text tokens, but 5 when"):
        dataset.load_tokens(0)


def test_several_images_of_a_sample_follow_each_other() -> None:
    images = (picture(56, 56), picture(84, 56, colour="blue"))
    dataset = dataset_of((images, turns("a|b")))
    assert dataset.sizes[0].grids == ((1, 4, 4), (1, 4, 6))
    parts = [image_patches(data, ImageRule()) for data in images]
    assert torch.equal(dataset.load_pixels(0), torch.cat(parts))
