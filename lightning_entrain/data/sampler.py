"""Global batches of sample indices, the same on every rank."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator, Sized
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler

from lightning_entrain.errors import CheckpointError, DataError


def worker_error(error: BaseException) -> DataError | None:
    """What torch says of a loader process that was ended from outside, as an error for the user.

    Args:
        error: Any exception; torch raises it in the training process, wherever that happens to be.

    Returns:
        None if the exception is about something else.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker"):
        return None
    first = text.splitlines()[0].rstrip(". ")
    return DataError(
        first,
        limit="loader processes run until training ends; when memory is short, the system kills "
        "them first",
        remedy="look for 'Out of memory' in the system's log; lower num_workers, "
        "global_batch_size or max_pixels, or free memory (in a container: also /dev/shm)",
    )


class PlannedSampler(DistributedSampler[Any]):
    """Yields lists of indices: one list per global batch, identical on all ranks.

    It counts as a distributed sampler, so that Lightning leaves it in place and tells it the
    epoch; but its "number of replicas" is 1, because the split over replicas is the assignment's.

    Args:
        num_samples: Samples in the dataset.
        global_batch_size: Samples per global batch.
        shuffle: Whether the order changes with every epoch.
        seed: Together with the epoch decides the order.
        drop_last: Whether an incomplete last batch is left out.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            cast(Any, range(num_samples)),
            num_replicas=1,
            rank=0,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.global_batch_size = global_batch_size
        self.start_batch = 0

    def order(self) -> list[int]:
        """All indices in the order of the current epoch."""
        num_samples = len(cast(Sized, self.dataset))
        if not self.shuffle:
            return list(range(num_samples))
        order = list(range(num_samples))
        # Both numbers enter whole: their sum would repeat orders across seeds, and torch's
        # generator looks at 32 bits only.
        random.Random(f"order:{self.seed}:{self.epoch}").shuffle(order)
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for b in range(self.start_batch, len(self)):
            yield order[b * self.global_batch_size : (b + 1) * self.global_batch_size]

    def __len__(self) -> int:
        whole, rest = divmod(len(cast(Sized, self.dataset)), self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1


def outlive_signals(worker_id: int) -> None:
    """Make a loader worker leave signals to its rank; the ``worker_init_fn`` of planned loaders.

    Ctrl-C, and often SIGTERM, reaches all processes of a job. Ranks then finish their step, for
    which they need the worker. It ends with its rank, or at a second SIGTERM, which is torch's way
    of ending a worker that is stuck.

    Args:
        worker_id: As torch passes it.
    """
    signal.set_wakeup_fd(-1)  # of a forked worker it is its rank's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )


class PlannedLoader(DataLoader[Any]):
    """A loader of global batches that knows how far it got.

    Lightning stores its state in checkpoints and restores it, so that training resumed in the
    middle of an epoch goes on with the next global batch. Its length stays that of a whole epoch.
    Build it with a :class:`PlannedSampler` as ``sampler`` and ``batch_size=None``.
    """

    # Lightning may build this loader anew from its arguments, so it has no constructor of its own.
    _position: tuple[int, int] = (0, 0)  # epoch, batches of it delivered
    _resume: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # All of this happens at the first batch: Lightning asks for the iterator before it tells
        # the sampler which epoch it is.
        if not isinstance(self.sampler, PlannedSampler):
            yield from super().__iter__()
            return
        epoch = self.sampler.epoch
        # A position belongs to its epoch: a later one starts at its beginning.
        start = self._resume[1] if self._resume and self._resume[0] == epoch else 0
        self._resume = None
        self._position = epoch, start
        self.sampler.start_batch = start
        batches = super().__iter__()
        for num_delivered in itertools.count(start + 1):
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                ended = worker_error(error)
                if ended is None:
                    raise
                raise ended from error
            # Counted here and not in the sampler, which loader workers let run ahead.
            self._position = epoch, num_delivered
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch, and what it is a position in.

        Empty while Lightning's ``overfit_batches`` has replaced the sampler.
        """
        if not isinstance(self.sampler, PlannedSampler):
            return {}
        epoch, num_delivered = self._resume or self._position
        return {
            "epoch": epoch,
            "num_delivered": num_delivered,
            "num_batches": len(self),
            "num_samples": len(cast(Sized, self.sampler.dataset)),
            "global_batch_size": self.sampler.global_batch_size,
            "seed": self.sampler.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            CheckpointError: If the position lies inside an epoch that this loader would deliver
                in another order.
        """
        own = self.state_dict()
        if not own or not state:
            return
        inside = 0 < state["num_delivered"] < state["num_batches"]
        for name in ("num_samples", "global_batch_size", "seed"):
            if inside and own[name] != state[name]:
                raise CheckpointError(
                    f"The checkpoint was written in the middle of an epoch with {name}="
                    f"{state[name]}, and now {name} is {own[name]}",
                    limit="data and order stay the same until the epoch ends",
                    remedy=f"resume with {name}={state[name]}, or from an end-of-epoch checkpoint",
                )
        self._resume = state["epoch"], state["num_delivered"]
