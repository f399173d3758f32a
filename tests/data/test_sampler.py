from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Iterator

import pytest
from torch.utils.data import DistributedSampler

from lightning_entrain.assign import POLICIES
from lightning_entrain.data.batch import DataNeeds
from lightning_entrain.data.planned import BatchShape, GlobalBatches, fixed_policy, resolve_policy
from lightning_entrain.data.sampler import PlannedLoader, PlannedSampler, worker_error
from lightning_entrain.data.synthetic import synthetic_dataset
from lightning_entrain.errors import CheckpointError, ConfigError, DataError
from lightning_entrain.train import user_error

DATASET = synthetic_dataset(23, max_side=60)


def loader(seed: int = 0, size: int = 4, workers: int = 0, samples: int = 23) -> PlannedLoader:
    shape = BatchShape(global_batch_size=size, num_microbatches=2)
    return PlannedLoader(
        GlobalBatches(DATASET, range(samples), shape=shape),
        sampler=PlannedSampler(samples, size, shuffle=True, seed=seed, drop_last=True),
        batch_size=None,
        num_workers=workers,
    )


def test_every_sample_comes_once_an_epoch() -> None:
    sampler = PlannedSampler(23, 4, shuffle=True)
    assert isinstance(sampler, DistributedSampler)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert sorted(i for batch in batches for i in batch) == list(range(23))
    assert len(sampler) == 6
    dropping = PlannedSampler(23, 4, shuffle=True, drop_last=True)
    assert list(dropping) == batches[:5]
    assert len(dropping) == 5
    assert list(PlannedSampler(5, 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    orders = []
    for seed in range(3):
        for epoch in range(3):
            sampler = PlannedSampler(23, 4, shuffle=True, seed=seed)
            sampler.set_epoch(epoch)
            assert sampler.order() == sampler.order()
            orders.append(tuple(sampler.order()))
    assert len(set(orders)) == 9


class Deadly:
    """Samples of which loading the third batch costs the loader process its life."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __getitem__(self, positions: list[int]) -> list[int]:
        if 8 in positions and self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if 8 in positions and self.error is not None:
            raise self.error
        return positions


def delivered(dataset: Deadly) -> Iterator[list[int]]:
    sampler = PlannedSampler(16, 4, shuffle=False)
    yield from PlannedLoader(dataset, sampler=sampler, batch_size=None, num_workers=1)


def test_a_loader_process_that_was_killed_is_told_with_its_usual_cause() -> None:
    with pytest.raises(DataError) as caught:
        list(delivered(Deadly()))
    assert re.match(
        r"DataLoader worker \(pid.* \d+\) .*Limit: .*memory.*Remedy: ", str(caught.value)
    )
    assert user_error(caught.value) is caught.value
    # Torch may notice it while the training process does something else.
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(user_error(caught.value.__cause__)) == str(caught.value)


def test_other_errors_of_loading_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        list(delivered(Deadly(RuntimeError("something else"))))
    assert worker_error(ValueError("DataLoader worker")) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(workers: int) -> None:
    first = loader(workers=workers)
    first.sampler.set_epoch(2)
    whole = [batch.sample_indices for batch in first]
    assert len(whole) == len(first) == 5

    running = iter(first)
    for _ in range(2):
        next(running)
    state = first.state_dict()
    assert state["num_delivered"] == 2  # whatever the workers have prefetched

    second = loader(workers=workers)
    second.load_state_dict(state)
    assert second.state_dict() == state
    delivering = iter(second)
    second.sampler.set_epoch(2)  # Lightning does so after it asked for the iterator
    assert [batch.sample_indices for batch in delivering] == whole[2:]
    assert len(second) == 5
    assert second.state_dict()["num_delivered"] == 5
    assert [batch.sample_indices for batch in second] == whole


def test_a_position_belongs_to_its_epoch() -> None:
    first = loader()
    list(first)
    state = first.state_dict()
    assert (state["epoch"], state["num_delivered"]) == (0, 5)
    second = loader()
    second.load_state_dict(state)
    second.sampler.set_epoch(1)
    assert len(list(second)) == 5
    # Saved between the epochs: the sampler is ahead of what was delivered.
    first.sampler.set_epoch(1)
    assert first.state_dict() == state


@pytest.mark.parametrize("change", [{"seed": 1}, {"size": 3}, {"samples": 22}])
def test_a_position_in_another_order_is_refused(change: dict[str, int]) -> None:
    first = loader()
    next(iter(first))
    with pytest.raises(CheckpointError, match=r"in the middle of an epoch with \w+=\d+, and now"):
        loader(**change).load_state_dict(first.state_dict())
    list(first)
    loader(**change).load_state_dict(first.state_dict())


def test_microbatches_follow_from_their_size() -> None:
    shape = BatchShape(global_batch_size=12, micro_batch_size=2)
    assert shape.microbatches(12, 2) == 3
    assert shape.microbatches(5, 2) == 2
    assert shape.microbatches(1, 2) == 1
    assert BatchShape(global_batch_size=12, num_microbatches=5).microbatches(3, 2) == 5
    batches = GlobalBatches(DATASET, range(23), shape=shape, num_replicas=2)
    assert [replica.num_microbatches for replica in batches[0].assignment.replicas] == [3, 3]
    assert [replica.num_microbatches for replica in batches[1].assignment.replicas] == [3, 3]
    assert batches[1].num_samples == 11


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 0, "num_microbatches": 1}, "global_batch_size is 0"),
        ({"global_batch_size": 4, "num_microbatches": 0}, "num_microbatches is 0"),
        ({"global_batch_size": 4, "micro_batch_size": -1}, "micro_batch_size is -1"),
        ({"global_batch_size": 4}, "exactly one of the two"),
        (
            {"global_batch_size": 4, "num_microbatches": 2, "micro_batch_size": 2},
            "exactly one of the two",
        ),
    ],
)
def test_shapes_are_checked(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchShape(**options)


def test_a_global_batch_that_replicas_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 16\. .*divisible by 3 replicas\..*15 or 18"):
        BatchShape(global_batch_size=16, num_microbatches=2).check_replicas(3)
    shape = BatchShape(global_batch_size=4, micro_batch_size=3)
    with pytest.raises(
        ConfigError, match=r"2 replicas x micro_batch_size 3 = 6\..*to 6, or change"
    ):
        shape.check_replicas(2)
    BatchShape(global_batch_size=18, micro_batch_size=3).check_replicas(3)


def test_a_policy_gets_the_costs_and_its_assignment_is_checked() -> None:
    seen = []

    def policy(*args: object) -> object:
        seen.append(args)
        return fixed_policy(*args)  # type: ignore[arg-type]

    shape = BatchShape(global_batch_size=4, num_microbatches=2)
    batches = GlobalBatches(DATASET, range(3, 23), shape=shape, policy=policy, seed=7)
    batch = batches[[0, 5, 6, 19]]
    assert batch.sample_indices == (3, 8, 9, 22)
    sizes = [DATASET.sizes[i] for i in (3, 8, 9, 22)]
    assert seen == [
        (
            [size.num_patches for size in sizes],
            [size.num_tokens for size in sizes],
            [size.has_images for size in sizes],
            1,
            2,
            7,
        )
    ]

    def lose(*args: object) -> object:
        return fixed_policy(args[0], args[1], args[2][:-1], *args[3:])  # type: ignore[index,arg-type]

    with pytest.raises(Exception, match="3 entries for 4 samples"):
        GlobalBatches(DATASET, range(23), shape=shape, policy=lose)[0]
    with pytest.raises(ConfigError, match=r"assignment is 'fixxed'.*one of .*fixed"):
        resolve_policy("fixxed")


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("num_samples", [23, 21])
def test_every_named_policy_plans_whole_and_incomplete_batches(name: str, num_samples: int) -> None:
    policy = pickle.loads(pickle.dumps(resolve_policy(name)))
    shape = BatchShape(global_batch_size=8, num_microbatches=3)
    nothing = DataNeeds(pixels=False, input_ids=False, labels=False)
    batches = GlobalBatches(
        DATASET, range(num_samples), shape=shape, policy=policy, num_replicas=2, needs=nothing
    )
    for number in range(3):
        batch = batches[number]  # checked against the rules there
        assert batch.assignment.policy == name
        assert batch.assignment.digest() == batches[number].assignment.digest()
