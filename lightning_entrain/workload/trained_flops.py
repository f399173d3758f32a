"""Model FLOPs of a training step by what is trained: forward, and the backward that is needed.

By convention model FLOPs count the work that the model asks for, not how it is carried out: neither
recomputed activations nor the scores that fused attention computes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_entrain.workload.flops import attention_flops, linear_flops
from lightning_entrain.workload.layers import AttentionPattern, Layer, Linear
from lightning_entrain.workload.shapes import FloatArray, Load, ModelShape, ModuleShape
from lightning_entrain.workload.tables import SizeTable


@dataclass(frozen=True, kw_only=True)
class TrainedParts:
    """Part of each layer's parameters that is trained, 0 to 1; as in `ModuleShape.layers`.

    Attributes:
        encoder: Of the encoder, its merger and projector included.
        llm: Of the LLM, embedding and head included.
    """

    encoder: tuple[float, ...]
    llm: tuple[float, ...]

    @classmethod
    def whole(cls, model: ModelShape) -> TrainedParts:
        """All parameters of a model."""
        return cls(encoder=(1.0,) * len(model.encoder.layers), llm=(1.0,) * len(model.llm.layers))


class TrainingFlops:
    """Model FLOPs of training samples: forward and backward, both modules together.

    Forward (F) counts always. Gradients of inputs (I) count behind the first layer with a trained
    parameter, and inside that layer behind its first matrix multiplications; gradients of weights
    (W) count in proportion to the trained parameters, which for adapters is their own size. The
    adapters' small forward is left out.

    Args:
        model: The model's shape.
        trained: What is trained.
    """

    def __init__(self, model: ModelShape, trained: TrainedParts) -> None:
        self._modules = model.modules
        self._per_unit: dict[str, FloatArray] = {
            module.name: np.zeros(len(_UNITS.rows)) for module in model.modules
        }
        for (name, layer, work), count in Counter(_works(model, trained)).items():
            self._per_unit[name] += count * work.flops(layer, _UNITS)

    def __call__(self, table: SizeTable) -> float:
        """Operations of all samples of a table together."""
        total = 0.0
        for module in self._modules:
            load, per_unit = module.load(table), self._per_unit[module.name]
            rows, merged, *pairs = per_unit.tolist()
            total += rows * float(load.rows.sum()) + merged * float(load.merged.sum())
            for pattern, each in zip(AttentionPattern, pairs, strict=True):
                if each:
                    total += each * float(load.pairs[pattern].sum())
        return total


def _units() -> Load:
    """One row, one merged row, and one pair of each pattern: operations are linear in them."""
    rows, merged, *pairs = np.eye(2 + len(AttentionPattern))
    return Load(rows=rows, merged=merged, pairs=dict(zip(AttentionPattern, pairs, strict=True)))


_UNITS = _units()


@dataclass(frozen=True)
class _Work:
    """What of a layer is computed: its trained part, and where it stands to the first trained."""

    trained: float
    is_first: bool
    is_behind: bool

    def flops(self, layer: Layer, load: Load) -> FloatArray:
        linear, attention = linear_flops(layer, load), attention_flops(layer, load)
        total = linear * (1.0 + self.trained) + attention
        if self.is_behind:
            return total + linear + 2.0 * attention
        if self.is_first:
            entry = Layer(kind=layer.kind, linears=_entry(layer))
            return total + linear - linear_flops(entry, load) + 2.0 * attention
        return total


def _works(model: ModelShape, trained: TrainedParts) -> Iterator[tuple[str, Layer, _Work]]:
    reached = False
    for module, parts in ((model.encoder, trained.encoder), (model.llm, trained.llm)):
        for layer, part in zip(module.layers, _checked(module, parts), strict=True):
            is_first = part > 0 and not reached
            yield module.name, layer, _Work(part, is_first, reached)
            reached = reached or part > 0


def _checked(module: ModuleShape, parts: tuple[float, ...]) -> tuple[float, ...]:
    assert len(parts) == len(module.layers), f"{len(parts)} parts of {module.name}"
    return parts


def _entry(layer: Layer) -> tuple[Linear, ...]:
    """The matrix multiplications that work on the layer's own input: of a block, Q, K and V."""
    if layer.attention is None:
        return layer.linears[:1]
    fused = layer.linears[0].out_features > layer.attention.width
    return layer.linears[: 1 if fused else 3]
