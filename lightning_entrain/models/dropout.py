"""Dropout whose masks follow from counters, not from a generator's state.

An element's fate depends on the seed, the step, the sample, the layer, the row's position within
the sample and the column. So a sample meets the same masks in every layout and in any company,
in a recomputed forward as in the first, and after a resume.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.on_device import on_device
from lightning_entrain.models.recompute import CONTEXTS

_BITS = 24
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's multipliers, as signed numbers
_STEP = -0x61C8864680B583EB  # its increment


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Which rows of a packed tensor belong to which sample.

    Attributes:
        samples: Index of each sample in its global batch, in row order.
        lengths: Rows per sample; one tuple for each kind of row that layers may see (the encoder
            has patches, and merged tokens at its end).
        step: Training steps so far, 0-dim int64.
    """

    samples: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    step: Tensor
    _keys: dict[int, Tensor] = field(default_factory=dict)

    def keys(self, num_rows: int) -> Tensor | None:
        """One number per row, ``[rows]`` int64; None if no kind has that many rows."""
        if num_rows not in self._keys:
            lengths = next((own for own in self.lengths if sum(own) == num_rows), None)
            if lengths is None:
                return None
            device = self.step.device
            counts = torch.tensor(lengths)
            starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
            samples = on_device(torch.tensor(self.samples).repeat_interleave(counts), device)
            position = on_device(torch.arange(num_rows) - starts, device)
            self._keys[num_rows] = _mix(_mix(_mix(self.step) + samples) + position)
        return self._keys[num_rows]


_ROWS: ContextVar[PackedRows | None] = ContextVar("dropout_rows", default=None)


@contextmanager
def dropout_rows(rows: PackedRows | None) -> Iterator[None]:
    """Tell the dropout layers run inside what their rows are."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


CONTEXTS.append(lambda: partial(dropout_rows, _ROWS.get()))


class CountedDropout(nn.Module):
    """Takes the place of ``nn.Dropout``.

    Args:
        rate: Probability that an element becomes 0; others are scaled by ``1 / (1 - rate)``.
        key: Tells layers and seeds apart, 64 bits.
    """

    def __init__(self, rate: float, key: int) -> None:
        super().__init__()
        self.p = rate
        self.key = key

    def extra_repr(self) -> str:
        """The rate."""
        return f"p={self.p}"

    @torch.compiler.disable
    def forward(self, inputs: Tensor) -> Tensor:
        """Drop elements of ``[rows, ...]`` or ``[1, rows, ...]``.

        Raises:
            RuntimeMismatchError: If it is unknown which samples the rows belong to.
        """
        if not self.training or self.p == 0.0:
            return inputs
        shape = inputs.shape[1:] if inputs.ndim > 2 and inputs.shape[0] == 1 else inputs.shape
        rows = _ROWS.get()
        keys = None if rows is None or len(shape) < 2 else rows.keys(shape[0])
        if keys is None:
            raise RuntimeMismatchError(
                f"A dropout layer got a tensor of shape {tuple(inputs.shape)}",
                limit="[rows, ...] or [1, rows, ...] with the rows of a planned batch",
                remedy="call the model with a batch of EntrainDataModule, or in eval mode; drop "
                "hidden states, not attention weights",
            )
        columns = torch.arange(math.prod(shape[1:]), device=keys.device)
        numbers = _mix(_mix(keys + self.key)[:, None] + columns * _STEP)
        kept = _shifted(numbers, 64 - _BITS) >= round(self.p * 2**_BITS)
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
        return inputs * (kept.view(inputs.shape).to(inputs.dtype) * scale)


def count_dropout(model: nn.Module, seed: int) -> bool:
    """Replace every ``nn.Dropout`` with a positive rate, in place.

    Args:
        model: The model; a layer's name in it tells its masks from others'.
        seed: Another seed, other masks.

    Returns:
        Whether the model drops anything.

    Raises:
        ConfigError: If it has a dropout of whole channels, which masks by row cannot stand for.
    """
    found = False
    for name, module in list(model.named_modules()):
        found = found or isinstance(module, CountedDropout)
        if not isinstance(module, nn.modules.dropout._DropoutNd) or not module.p > 0:
            continue
        if type(module) is not nn.Dropout:
            raise ConfigError(
                f"{name} is a {type(module).__name__} with rate {module.p}",
                limit="nn.Dropout, whose masks can be the same in every layout",
                remedy="use nn.Dropout, or set the rate to 0",
            )
        parent, _, leaf = name.rpartition(".")
        made = CountedDropout(float(module.p), layer_key(name, seed)).train(module.training)
        model.get_submodule(parent)._modules[leaf] = made
        found = True
    return found


def layer_key(name: str, seed: int) -> int:
    """A signed 64-bit number of a layer's name and the seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def rows_of(
    samples: Sequence[int], lengths: Sequence[Sequence[int]], step: Tensor | None
) -> AbstractContextManager[Any]:
    """The context for a stage's forward; does nothing in a model without dropout."""
    if step is None:
        return nullcontext()
    kinds = tuple(tuple(own) for own in lengths)
    return dropout_rows(PackedRows(samples=tuple(samples), lengths=kinds, step=step.clone()))


def _mix(numbers: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps around."""
    numbers = numbers + _STEP
    numbers = (numbers ^ _shifted(numbers, 30)) * _MIX[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * _MIX[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
