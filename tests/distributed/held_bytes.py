"""How many bytes autograd and the executor keep alive from forward to backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_entrain.runtime.state import StepState


class _Saved:
    """What autograd holds in place of a tensor; tells the meter when it is let go."""

    def __init__(self, tensor: Tensor, meter: HeldBytes) -> None:
        self.tensor = tensor
        self._meter = meter
        self._storage = _storage_of(tensor)
        meter.count(self._storage, 1)

    def __del__(self) -> None:
        self._meter.count(self._storage, -1)


class HeldBytes:
    """Counts every storage once, however many tensors share it.

    Args:
        constant: Tensors that stay through the step: parameters, buffers, the batch.
    """

    def __init__(self, constant: Iterable[Tensor]) -> None:
        self._constant = {_storage_of(tensor)[0] for tensor in constant}
        self._holders: dict[tuple[int, int], int] = {}

    def count(self, storage: tuple[int, int], by: int) -> None:
        """One holder of a storage more, or one less."""
        self._holders[storage] = self._holders.get(storage, 0) + by
        if not self._holders[storage]:
            del self._holders[storage]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside is counted until it is freed."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor
        ):
            yield

    def now(self, state: StepState) -> int:
        """Bytes kept for backward at this moment."""
        held = [*state.inputs.values(), *state.outputs.values()]
        held += [leaf for parts in state.features.values() for leaf in parts.values()]
        for work in state.weights.values():
            held += [tensor for entry in work for tensor in (entry.inputs, entry.gradient)]
        storages = {*self._holders, *map(_storage_of, held)}
        return sum(size for address, size in storages if address not in self._constant)


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
