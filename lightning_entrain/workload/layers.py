"""A layer as the operations that cost something, independent of any framework.

Widths are in elements per row. A row is a patch or a token; some operations run on fewer rows
(after merging patches), which ``axis`` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Axis(str, Enum):
    """What an operation's rows are."""

    ROWS = "rows"
    MERGED = "merged"


class Shard(str, Enum):
    """How tensor parallelism splits an operation's output (Megatron's column and row rules)."""

    NONE = "none"
    COLUMN = "column"
    ROW = "row"


class AttentionPattern(str, Enum):
    """Which pairs of rows attend to each other."""

    FULL = "full"
    WINDOW = "window"
    CAUSAL = "causal"
    SLIDING = "sliding"


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A matrix multiplication with a stored weight.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether it adds a bias.
        shard: How tensor parallelism splits it.
        axis: What its rows are.
        copies: Weights stored; more than 1 for the experts of a mixture.
        active: Weights that each row is multiplied with.
    """

    in_features: int
    out_features: int
    bias: bool = False
    shard: Shard = Shard.NONE
    axis: Axis = Axis.ROWS
    copies: int = 1
    active: int = 1

    @property
    def num_parameters(self) -> int:
        """Parameters of all copies, biases included."""
        return self.copies * (self.in_features * self.out_features + self.bias * self.out_features)

    def parameters_per_rank(self, tp: int) -> float:
        """Parameters held by one of ``tp`` ranks; a row-split bias is held by each."""
        if self.shard is Shard.NONE:
            return self.num_parameters
        bias = self.copies * self.bias * self.out_features
        weight = self.num_parameters - bias
        return weight / tp + (bias if self.shard is Shard.ROW else bias / tp)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Scaled dot-product attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        pattern: Which pairs of rows attend to each other.
        window: Side of a window in patches, or the length of a sliding window in tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: AttentionPattern
    window: int = 0

    @property
    def width(self) -> int:
        """Elements per row of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements per row of all key heads."""
        return self.num_kv_heads * self.head_dim


class Kept(str, Enum):
    """Element type of a tensor kept for the backward pass."""

    MODEL = "model"
    """The model's own dtype."""
    FP32 = "fp32"
    """Four bytes whatever the model's dtype."""
    FP32_COPY = "fp32_copy"
    """An fp32 copy in a half-precision model; the tensor itself in an fp32 one."""
    INT64 = "int64"
    """Token ids and labels."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A tensor that autograd keeps from forward to backward.

    Attributes:
        width: Elements per row.
        kept: Element type.
        axis: What its rows are.
        for_weights: Kept only where the layer's weights are trained.
        split: Divided over tensor-parallel ranks.
    """

    width: float
    kept: Kept = Kept.MODEL
    axis: Axis = Axis.ROWS
    for_weights: bool = False
    split: bool = False

    def bytes_per_row(self, element_bytes: int) -> float:
        """Bytes per row of its axis."""
        sizes = {
            Kept.MODEL: element_bytes,
            Kept.FP32: 4,
            Kept.FP32_COPY: 4,
            Kept.INT64: 8,
        }
        return self.width * sizes[self.kept]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: what it multiplies, stores, moves and keeps.

    Attributes:
        kind: ``patch_embed``, ``encoder_block``, ``projector``, ``embedding``, ``decoder_block`` or
            ``head``.
        linears: Its matrix multiplications.
        attention: Its attention, if it has one.
        other_parameters: Norm weights, position tables, class tokens: on every rank.
        lookup_parameters: An embedding table, split by tensor parallelism.
        shared_parameters: Of all parameters, those tied to another layer's.
        moved: Elements per row read and written outside matrix multiplications.
        moved_merged: The same per merged row.
        num_kernels: Operations launched by one forward pass.
        saved: Tensors kept for backward.
    """

    kind: str
    linears: tuple[Linear, ...] = ()
    attention: Attention | None = None
    other_parameters: int = 0
    lookup_parameters: int = 0
    shared_parameters: int = 0
    moved: float = 0.0
    moved_merged: float = 0.0
    num_kernels: int = 1
    saved: tuple[Saved, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones included."""
        linear = sum(linear.num_parameters for linear in self.linears)
        return linear + self.other_parameters + self.lookup_parameters

    def parameters_per_rank(self, tp: int) -> float:
        """Parameters held by one of ``tp`` tensor-parallel ranks."""
        linear = sum(linear.parameters_per_rank(tp) for linear in self.linears)
        return linear + self.other_parameters + self.lookup_parameters / tp

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters of this rank on every linear layer."""
        return sum(
            rank * (item.in_features + item.out_features) * item.copies for item in self.linears
        )
