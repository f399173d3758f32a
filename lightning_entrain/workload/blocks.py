"""Builders of layers, written after the Hugging Face implementations' forward passes.

Traffic of element-wise work is that of fused kernels: every step reads its inputs and writes its
outputs once, which is what a roofline bounds.

The lists of saved tensors follow autograd's rules: a multiplication keeps both factors that need a
gradient's counterpart, a linear layer keeps its input while its weight is trained, a residual sum
keeps nothing.
"""

from __future__ import annotations

from typing import Literal

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.layers import (
    Attention,
    AttentionPattern,
    Axis,
    Kept,
    Layer,
    Linear,
    Saved,
    Shard,
)

Norm = Literal["rms", "rms_unit", "layer"]
"""``rms`` scales in the model's dtype (Llama), ``rms_unit`` by 1 + weight in fp32 (Gemma)."""

Activation = Literal["fused", "quick_gelu"]
"""``fused`` keeps its input alone; CLIP's quick GELU keeps its sigmoid too."""


def norm_parameters(norm: Norm, width: int) -> int:
    """Parameters of a norm."""
    return 2 * width if norm == "layer" else width


def norm_saved(norm: Norm, width: int, *, axis: Axis = Axis.ROWS) -> tuple[Saved, ...]:
    """Tensors a norm keeps, its output not included."""
    if norm == "layer":
        return (Saved(width=width, axis=axis), Saved(width=2, kept=Kept.FP32, axis=axis))
    scaled = Kept.MODEL if norm == "rms" else Kept.FP32
    return (
        Saved(width=width, kept=Kept.FP32_COPY, axis=axis),
        Saved(width=1, kept=Kept.FP32, axis=axis),
        # Gemma multiplies by 1 + weight, whose gradient needs the scaled input likewise.
        Saved(width=width, kept=scaled, axis=axis, for_weights=True),
    )


def _norm_moved(width: int) -> float:
    """Elements a fused norm moves: it reads its input and writes its output once."""
    return 2.0 * width


def transformer_block(
    *,
    kind: str,
    hidden_size: int,
    attention: Attention,
    mlp_size: int,
    gated: bool,
    norm: Norm,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    fused_qkv: bool = False,
    rotary: bool = True,
    chunked_attention: bool = False,
    sandwich_norms: bool = False,
    qk_norm: Norm | None = None,
    qk_norm_per_head: bool = True,
    layer_scale: bool = False,
    activation: Activation = "fused",
    num_experts: int = 0,
    experts_per_token: int = 0,
    shared_mlp_size: int = 0,
) -> Layer:
    """A pre-norm transformer block: attention and MLP, each behind a norm and a residual.

    Args:
        kind: ``encoder_block`` or ``decoder_block``.
        hidden_size: Width of the residual stream.
        attention: Its attention.
        mlp_size: Inner width of the MLP, or of one expert.
        gated: Gated (SwiGLU-like) or plain MLP.
        norm: Kind of its norms.
        qkv_bias: Biases of the query, key and value projections.
        output_bias: Bias of the output projection.
        mlp_bias: Biases of the MLP.
        fused_qkv: Query, key and value are slices of one output, which then stays alive whole.
        rotary: Rotary position embedding on queries and keys.
        chunked_attention: Attention runs image by image and its outputs are concatenated.
        sandwich_norms: Norms behind attention and MLP too (Gemma 3).
        qk_norm: Norm of queries and keys, if any.
        qk_norm_per_head: Whether that norm's weight spans one head or all.
        layer_scale: Learnt scales on both residual branches (InternViT).
        activation: Kind of activation.
        num_experts: Experts of a mixture; 0 for a dense MLP.
        experts_per_token: Experts each row visits.
        shared_mlp_size: Inner width of an expert that every row visits, with its gate; 0 for none.
    """
    linears = _attention_linears(hidden_size, attention, qkv_bias, output_bias, fused_qkv)
    linears += _mlp(hidden_size, mlp_size, gated, mlp_bias, num_experts, experts_per_token)
    if num_experts:
        linears.append(Linear(in_features=hidden_size, out_features=num_experts))
    if shared_mlp_size:
        linears += _mlp(hidden_size, shared_mlp_size, gated, mlp_bias, 0, 0)
        linears.append(Linear(in_features=hidden_size, out_features=1))

    width, kv_width = attention.width, attention.kv_width
    num_norms = 4 if sandwich_norms else 2
    parameters = num_norms * norm_parameters(norm, hidden_size)
    moved = num_norms * _norm_moved(hidden_size) + 6.0 * hidden_size
    saved = [*norm_saved(norm, hidden_size)] * num_norms
    saved += [Saved(width=hidden_size, for_weights=True)] * 2  # inputs of attention and MLP
    if qk_norm is not None:
        heads = (attention.num_heads, attention.num_kv_heads) if qk_norm_per_head else (1, 1)
        for count, total in zip(heads, (width, kv_width), strict=True):
            parameters += norm_parameters(qk_norm, total // count)
            saved += [_scaled(item, count, total) for item in norm_saved(qk_norm, total // count)]
            moved += _norm_moved(total)
    saved += _attention_saved(attention, fused_qkv, rotary, chunked_attention)
    moved += 2.0 * (width + kv_width) if rotary else 0.0
    if layer_scale:
        parameters += 2 * hidden_size
        saved += [Saved(width=hidden_size, for_weights=True)] * 2
        moved += 4.0 * hidden_size
    inner = mlp_size * (experts_per_token if num_experts else 1) + shared_mlp_size
    saved += _mlp_saved(inner, gated, activation)
    moved += (3.0 if gated else 2.0) * inner
    if num_experts:
        # Each visited expert gets its own copy of the row, and its output is kept to be weighted.
        saved += [Saved(width=2.0 * experts_per_token * hidden_size)]
        saved += [Saved(width=num_experts, kept=Kept.FP32)]
    return Layer(
        kind=kind,
        linears=tuple(linears),
        attention=attention,
        other_parameters=parameters,
        moved=moved,
        num_kernels=(12 if rotary else 0) + (24 if norm != "layer" else 12),
        saved=tuple(saved),
    )


def _attention_linears(
    hidden_size: int, attention: Attention, qkv_bias: bool, output_bias: bool, fused: bool
) -> list[Linear]:
    width, kv_width = attention.width, attention.kv_width
    inputs = [
        Linear(in_features=hidden_size, out_features=size, bias=qkv_bias, shard=Shard.COLUMN)
        for size in ((width + 2 * kv_width,) if fused else (width, kv_width, kv_width))
    ]
    output = Linear(in_features=width, out_features=hidden_size, bias=output_bias, shard=Shard.ROW)
    return [*inputs, output]


def _scaled(item: Saved, count: int, total: int) -> Saved:
    """A per-head norm's tensors, for all heads of a row."""
    width = total if item.width > 2 else item.width * count
    return Saved(width=width, kept=item.kept, for_weights=item.for_weights, split=True)


def _attention_saved(
    attention: Attention, fused_qkv: bool, rotary: bool, chunked: bool
) -> list[Saved]:
    width, kv_width = attention.width, attention.kv_width
    whole = width + 2 * kv_width
    saved = [Saved(width=attention.num_heads, kept=Kept.FP32, split=True)]  # log-sum-exp
    if rotary:
        saved.append(Saved(width=width + kv_width, split=True))
        # The value is a slice of the fused projection, whose storage survives as one.
        saved.append(Saved(width=whole if fused_qkv else kv_width, split=True))
    else:
        saved.append(Saved(width=whole, split=True))
    outputs = [Saved(width=width, split=True)]
    if chunked:
        outputs.append(Saved(width=width, split=True, for_weights=True))
    return saved + outputs


def _mlp(
    hidden_size: int, mlp_size: int, gated: bool, bias: bool, copies: int, active: int
) -> list[Linear]:
    copies, active = max(1, copies), max(1, active)

    def linear(inputs: int, outputs: int, shard: Shard) -> Linear:
        return Linear(
            in_features=inputs,
            out_features=outputs,
            bias=bias,
            shard=shard,
            copies=copies,
            active=active,
        )

    up = [linear(hidden_size, mlp_size, Shard.COLUMN) for _ in range(2 if gated else 1)]
    down = linear(mlp_size, hidden_size, Shard.ROW)
    return [*up, down]


def _mlp_saved(inner: int, gated: bool, activation: Activation) -> list[Saved]:
    count = 3 if gated else 1  # gate, activated gate, up | input of the activation
    if activation == "quick_gelu":
        count += 1
    return [
        Saved(width=count * inner, split=True),
        Saved(width=inner, split=True, for_weights=True),
    ]


def patch_embed(
    *,
    patch_dim: int,
    hidden_size: int,
    bias: bool,
    extra_parameters: int = 0,
    norm: Norm | None = None,
) -> Layer:
    """The convolution that turns pixels into patch vectors, with its position table.

    Args:
        patch_dim: Values per patch.
        hidden_size: Width of the encoder.
        bias: Bias of the convolution.
        extra_parameters: Position table, class token, mask token.
        norm: A norm behind it (CLIP), if any.
    """
    saved = [Saved(width=patch_dim, for_weights=True)]
    parameters = extra_parameters
    if norm is not None:
        saved += norm_saved(norm, hidden_size)
        parameters += norm_parameters(norm, hidden_size)
    return Layer(
        kind="patch_embed",
        linears=(Linear(in_features=patch_dim, out_features=hidden_size, bias=bias),),
        other_parameters=parameters,
        moved=4.0 * hidden_size,
        num_kernels=4,
        saved=tuple(saved),
    )


def projector(
    *,
    input_size: int,
    sizes: tuple[int, ...],
    bias: bool,
    norm: Norm | None,
    norm_axis: Axis = Axis.MERGED,
    merge: int = 1,
    extra_parameters: int = 0,
    final_norm_size: int = 0,
    final_norm: Norm = "layer",
    pooled: bool = False,
) -> Layer:
    """The layers from encoder output to LLM input, on merged rows.

    Args:
        input_size: Width of the encoder's output.
        sizes: Widths behind each linear layer; an activation lies between two.
        bias: Biases of the linear layers.
        norm: Norm in front, if any.
        norm_axis: Whether that norm runs before (``rows``) or after (``merged``) merging.
        merge: Rows concatenated into one.
        extra_parameters: Parameters that belong here but cost no time (an image-newline vector).
        final_norm_size: Width of the encoder's last norm, run on all rows; 0 for none.
        final_norm: Its kind.
        pooled: Rows are averaged, not concatenated (Gemma 3).
    """
    if not sizes:
        raise ConfigError("The projector has no linear layer", limit="at least one")
    wide = input_size * (1 if pooled else merge)
    saved: list[Saved] = []
    parameters = extra_parameters
    moved = 0.0
    if final_norm_size:
        saved += norm_saved(final_norm, final_norm_size)
        parameters += norm_parameters(final_norm, final_norm_size)
        moved += _norm_moved(final_norm_size)
    if pooled:
        saved.append(Saved(width=input_size))  # average pooling keeps its input
    if norm is not None:
        per_row = input_size if norm_axis is Axis.ROWS or pooled else wide
        saved += norm_saved(norm, per_row, axis=norm_axis)
        parameters += norm_parameters(norm, per_row)
    saved.append(Saved(width=wide, axis=Axis.MERGED, for_weights=True))
    linears, width = [], wide
    for index, size in enumerate(sizes):
        linears.append(Linear(in_features=width, out_features=size, bias=bias, axis=Axis.MERGED))
        if index + 1 < len(sizes):
            saved.append(Saved(width=size, axis=Axis.MERGED))
            saved.append(Saved(width=size, axis=Axis.MERGED, for_weights=True))
        width = size
    return Layer(
        kind="projector",
        linears=tuple(linears),
        other_parameters=parameters,
        moved=moved,
        moved_merged=4.0 * wide + 2.0 * sum(sizes),
        num_kernels=10,
        saved=tuple(saved),
    )


def embedding(*, vocab_size: int, hidden_size: int) -> Layer:
    """The token embedding; the vision features are put into its output."""
    return Layer(
        kind="embedding",
        lookup_parameters=vocab_size * hidden_size,
        moved=4.0 * hidden_size,
        num_kernels=4,
        saved=(Saved(width=1, kept=Kept.INT64, for_weights=True),),
    )


def head(*, vocab_size: int, hidden_size: int, norm: Norm, tied: bool, bias: bool = False) -> Layer:
    """The last norm, the output projection and the cross entropy in fp32."""
    linear = Linear(in_features=hidden_size, out_features=vocab_size, bias=bias, shard=Shard.COLUMN)
    return Layer(
        kind="head",
        linears=(linear,),
        other_parameters=norm_parameters(norm, hidden_size),
        shared_parameters=vocab_size * hidden_size if tied else 0,
        moved=6.0 * vocab_size + _norm_moved(hidden_size),
        num_kernels=12,
        saved=(
            *norm_saved(norm, hidden_size),
            Saved(width=hidden_size, for_weights=True),
            Saved(width=vocab_size, kept=Kept.FP32, split=True),  # log-softmax
            Saved(width=1, kept=Kept.INT64),
        ),
    )


def full_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> Attention:
    """Every row of an image attends to every other."""
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        pattern=AttentionPattern.FULL,
    )
