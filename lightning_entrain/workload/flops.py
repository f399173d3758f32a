"""Floating-point operations from shapes.

Counted as torch's flop counter does: 2 per multiply-add of matrix multiplications and attention,
nothing for elementwise work, and full squares for causal attention (kernels that skip the upper
half do less; the time models know).
"""

from __future__ import annotations

import numpy as np

from lightning_entrain.workload.layers import AttentionPattern, Axis, Layer
from lightning_entrain.workload.shapes import FloatArray, Load, ModelShape, ModuleShape
from lightning_entrain.workload.tables import SizeTable

_CAUSAL = (AttentionPattern.CAUSAL, AttentionPattern.SLIDING)


def linear_flops(layer: Layer, load: Load) -> FloatArray:
    """Operations of a layer's matrix multiplications, forward."""
    total = np.zeros_like(load.rows)
    for linear in layer.linears:
        rows = load.merged if linear.axis is Axis.MERGED else load.rows
        total = total + 2.0 * linear.in_features * linear.out_features * linear.active * rows
    return total


def attention_flops(layer: Layer, load: Load, *, skip_masked: bool = False) -> FloatArray:
    """Operations of a layer's attention, forward.

    Args:
        layer: The layer.
        load: What it processes.
        skip_masked: Count half of a causal square, as kernels that skip masked blocks do.
    """
    if layer.attention is None:
        return np.zeros_like(load.rows)
    pairs = load.pairs[layer.attention.pattern]
    factor = 0.5 if skip_masked and layer.attention.pattern in _CAUSAL else 1.0
    return 4.0 * layer.attention.width * factor * pairs


def layer_flops(layer: Layer, load: Load) -> FloatArray:
    """Forward operations of one layer; an array as long as the load's."""
    return linear_flops(layer, load) + attention_flops(layer, load)


def module_flops(module: ModuleShape, load: Load) -> FloatArray:
    """Forward operations of a whole module, prologue and epilogue included."""
    total = np.zeros_like(load.rows)
    for layer, count in module.counted_layers:
        total = total + count * layer_flops(layer, load)
    return total


def sample_flops(model: ModelShape, table: SizeTable) -> tuple[FloatArray, FloatArray]:
    """Forward operations per sample in the encoder and in the LLM, each ``[num_samples]``."""
    encoder, llm = model.modules
    return module_flops(encoder, encoder.load(table)), module_flops(llm, llm.load(table))


def backward_flops(layer: Layer, load: Load) -> FloatArray:
    """Backward operations of a fully trained layer: twice the forward's matrix multiplications.

    Attention takes 2.5 times its forward, because the scores are computed again.
    """
    return 2.0 * linear_flops(layer, load) + 2.5 * attention_flops(layer, load)
