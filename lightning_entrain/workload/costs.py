"""The interface of cost models, and what is derived from any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.memory import Training, saved_bytes, state_bytes
from lightning_entrain.workload.shapes import FloatArray, Load, ModelShape, ModuleShape
from lightning_entrain.workload.tables import SizeTable


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Time of one layer for each entry of a load; arrays as long as the load's.

    Attributes:
        forward_ms: Forward.
        input_ms: Backward, gradient of the input (with the forward again under recomputation).
        weight_ms: Backward, gradient of the weights.
    """

    forward_ms: FloatArray
    input_ms: FloatArray
    weight_ms: FloatArray

    @property
    def backward_ms(self) -> FloatArray:
        """Both parts of the backward."""
        return self.input_ms + self.weight_ms

    @property
    def total_ms(self) -> FloatArray:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True)
class LayerCost(LayerTimes):
    """Cost of one layer for each entry of a load; arrays as long as the load's.

    Attributes:
        forward_flops: Operations of the forward, counted as torch does.
        backward_flops: Operations of the backward.
        saved_bytes: Kept from forward to backward.
        state_bytes: Parameters, gradients and optimizer states; one number.
    """

    forward_flops: FloatArray
    backward_flops: FloatArray
    saved_bytes: FloatArray
    state_bytes: float


class CostModel(Protocol):
    """Time, operations and memory of a layer (Entrain, section 4.1)."""

    @property
    def name(self) -> str:
        """Name for tables, e.g. ``analytic (a40)``."""

    @property
    def tp_sizes(self) -> tuple[int, ...] | None:
        """Tensor-parallel sizes it knows; None for any."""

    def layer_cost(
        self,
        module: str,
        layer: Layer,
        load: Load,
        training: Training,
        *,
        tp: int = 1,
        cp: int = 1,
        rows_together: float | None = None,
    ) -> LayerCost:
        """Cost of one layer on one rank.

        Args:
            module: ``encoder`` or ``llm``.
            layer: The layer.
            load: What it processes, one entry per sample or per microbatch.
            training: What is trained, number format, recomputation.
            tp: Tensor-parallel ranks.
            cp: Context-parallel ranks.
            rows_together: Rows of the microbatch that each entry is part of: it sets the speed of
                the matrix multiplications and shares out fixed costs. None: an entry is a whole
                microbatch.
        """

    def layer_times(
        self,
        module: str,
        layer: Layer,
        load: Load,
        training: Training,
        *,
        tp: int = 1,
        cp: int = 1,
        rows_together: float | None = None,
    ) -> LayerTimes:
        """The times of :meth:`layer_cost` alone, which take less than half as long to find."""


def check_parallelism(layer: Layer, *, tp: int, cp: int) -> None:
    """Refuse tensor parallelism that does not divide the heads or the MLP.

    Raises:
        ConfigError: Naming the number that is not divisible.
    """
    if tp < 1 or cp < 1:
        raise ConfigError(f"tp is {tp}, cp is {cp}", limit="at least 1")
    if layer.attention is None or tp == 1:
        return
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(layer.attention, name)
        if heads % tp:
            raise ConfigError(
                f"tp is {tp} for a {layer.kind} with {name} {heads}",
                limit=f"tp divides {name}",
                remedy=f"use a divisor of {heads}",
            )


def memory_cost(
    module: str, layer: Layer, load: Load, training: Training, *, tp: int, cp: int
) -> tuple[FloatArray, float]:
    """Bytes kept for backward per entry, and bytes of the layer's own state."""
    kept = saved_bytes(
        layer,
        load,
        element_bytes=training.element_bytes,
        mode=training.mode_of(module, layer),
        needs_input_gradient=training.needs_input_gradient(module, layer),
        tp=tp,
        lora_rank=training.lora_rank,
    )
    return kept / cp, state_bytes(module, [layer], training, tp=tp).total


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """Predicted milliseconds per sample, arrays ``[num_samples]``.

    Attributes:
        encoder_forward_ms: Forward in the whole encoder; 0 for samples without images.
        llm_forward_ms: Forward in the whole LLM.
        encoder_backward_ms: Backward in the encoder.
        llm_backward_ms: Backward in the LLM.
    """

    encoder_forward_ms: FloatArray
    llm_forward_ms: FloatArray
    encoder_backward_ms: FloatArray
    llm_backward_ms: FloatArray

    @property
    def encoder_ms(self) -> FloatArray:
        """Forward and backward in the encoder."""
        return self.encoder_forward_ms + self.encoder_backward_ms

    @property
    def llm_ms(self) -> FloatArray:
        """Forward and backward in the LLM."""
        return self.llm_forward_ms + self.llm_backward_ms


def sample_costs(
    model: ModelShape,
    table: SizeTable,
    cost_model: CostModel,
    training: Training | None = None,
    *,
    encoder_tp: int = 1,
    llm_tp: int = 1,
    microbatch_size: float = 4.0,
) -> SampleCosts:
    """What each sample costs in each module, for b_min and for assignments.

    Args:
        model: Shape of the model.
        table: Sizes of the samples.
        cost_model: Analytic or measured.
        training: What is trained; None trains all.
        encoder_tp: Tensor-parallel ranks of the encoder.
        llm_tp: Tensor-parallel ranks of the LLM.
        microbatch_size: Samples that run together on average.
    """
    training = training or Training()
    parts = []
    for module, tp in ((model.encoder, encoder_tp), (model.llm, llm_tp)):
        load = module.load(table)
        together = max(1.0, microbatch_size * float(load.rows.mean()))
        parts.append(module_cost(module, load, cost_model, training, tp=tp, rows_together=together))
    (encoder_forward, encoder_backward), (llm_forward, llm_backward) = parts
    return SampleCosts(
        encoder_forward_ms=encoder_forward,
        llm_forward_ms=llm_forward,
        encoder_backward_ms=encoder_backward,
        llm_backward_ms=llm_backward,
    )


def module_cost(
    module: ModuleShape,
    load: Load,
    cost_model: CostModel,
    training: Training,
    *,
    tp: int = 1,
    cp: int = 1,
    rows_together: float | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward milliseconds of a whole module, one number per entry of the load."""
    forward = np.zeros_like(load.rows)
    backward = np.zeros_like(load.rows)
    for layer, count in module.counted_layers:
        times = cost_model.layer_times(
            module.name, layer, load, training, tp=tp, cp=cp, rows_together=rows_together
        )
        forward = forward + count * times.forward_ms
        backward = backward + count * times.backward_ms
    return forward, backward
