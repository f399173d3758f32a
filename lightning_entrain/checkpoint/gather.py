"""Bringing the parts of all ranks to rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TensorGather:
    """Collects nested dictionaries of tensors on global rank 0.

    Structure travels as pickled metadata, tensors one by one as raw messages, so that no rank but 0
    ever holds more than its own part and one tensor.

    Args:
        group: Group of all ranks on the host (gloo); None in a job of one process.
        sources: Ranks that contribute; each name must come from one of them only.
        copy: Copy tensors that lie on the host already, so that training may go on.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, sources: Sequence[int], *, copy: bool = False
    ) -> None:
        self._group = group
        self._sources = tuple(sources)
        self._copy = copy

    def __call__(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Every rank calls this together; ranks other than 0 get their own part back.

        Args:
            own: Name to tensor, or name to dictionary of tensors and plain values.
        """
        result = {name: _to_host(value, copy=self._copy) for name, value in own.items()}
        if self._group is None:
            return result
        rank = dist.get_rank()
        for source in self._sources:
            if source == 0:
                continue
            if rank == source:
                self._send(result)
            elif rank == 0:
                result.update(self._receive(source))
        return result

    def _send(self, part: Mapping[str, Any]) -> None:
        tensors: list[Tensor] = []
        described = {name: _describe(value, tensors) for name, value in part.items()}
        dist.send_object_list([described], 0, group=self._group)
        for tensor in tensors:
            if tensor.numel():
                dist.send(_as_bytes(tensor), 0, group=self._group)

    def _receive(self, source: int) -> dict[str, Any]:
        box: list[Any] = [None]
        dist.recv_object_list(box, source, group=self._group)
        return {name: self._rebuild(entry, source) for name, entry in box[0].items()}

    def _rebuild(self, entry: Any, source: int) -> Any:
        if isinstance(entry, _TensorSpec):
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            if tensor.numel():
                dist.recv(_as_bytes(tensor), source, group=self._group)
            return tensor
        if isinstance(entry, dict):
            return {key: self._rebuild(value, source) for key, value in entry.items()}
        return entry


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


def copy_to_host(value: Any, memo: dict[int, Any]) -> None:
    """Copy all tensors to the host, for ``copy.deepcopy`` to find in its memo.

    It would copy them on their device otherwise, where memory is short. From CUDA all copies run
    together, into page-locked memory. Tensors that are the same memory stay so. Subclasses and
    sparse tensors are left to ``copy.deepcopy``: they may have no memory of their own to compare.

    Args:
        value: Nested dictionaries, lists and tuples.
        memo: Receives the copies, by the id of the tensors.
    """
    known: dict[tuple[Any, ...], Tensor] = {}
    _copy_each(value, memo, known)
    if any(key[0] == "cuda" for key in known):
        torch.cuda.synchronize()


def _copy_each(value: Any, memo: dict[int, Any], known: dict[tuple[Any, ...], Tensor]) -> None:
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not plain or (value.data_ptr() == 0 and value.numel()):
            return
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        key = (value.device.type, value.device.index, *place)
        if value.numel() == 0 or key not in known:
            copied = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            known[key] = copied.copy_(value.detach(), non_blocking=True)
        memo[id(value)] = known[key]
    elif isinstance(value, Mapping):
        for entry in value.values():
            _copy_each(entry, memo, known)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _copy_each(entry, memo, known)


def _to_host(value: Any, *, copy: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, Mapping):
        return {key: _to_host(entry, copy=copy) for key, entry in value.items()}
    return value


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        return _TensorSpec(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: _describe(entry, tensors) for key, entry in value.items()}
    return value


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes: gloo sends every type alike then."""
    return tensor.view(-1).view(torch.uint8)
