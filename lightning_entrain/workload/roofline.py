"""The analytic cost model: shapes on a roofline. Needs no device (goes beyond the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_entrain.workload.costs import LayerCost, LayerTimes, check_parallelism, memory_cost
from lightning_entrain.workload.flops import attention_flops, layer_flops, linear_flops
from lightning_entrain.workload.hardware import Device
from lightning_entrain.workload.layers import Axis, Layer, Shard
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import FloatArray, Load

ATTENTION_FORWARD = 0.60
ATTENTION_BACKWARD = 0.50
ATTENTION_HALF_LENGTH = 200.0
"""Fused attention reaches these fractions of the peak for long sequences, half of them at this
length: read off the A100 plots of FlashAttention-2 (arXiv 2307.08691, figures 4-6)."""

MOVE_EFFICIENCY = 0.85
"""Share of the memory bandwidth that element-wise kernels reach, as stream benchmarks do."""

LINK_EFFICIENCY = 0.80
"""Share of the link bandwidth that a large all-reduce reaches."""


@dataclass(frozen=True, kw_only=True)
class AnalyticCostModel:
    """Matrix multiplications, fused attention, memory traffic, launches and collectives, added up.

    Attributes:
        device: The accelerator.
        link_gbps: Bandwidth between tensor-parallel neighbours, one direction, GB/s.
    """

    device: Device
    link_gbps: float | None = None

    @property
    def name(self) -> str:
        """``analytic`` and the device."""
        return f"analytic ({self.device.name})"

    @property
    def tp_sizes(self) -> tuple[int, ...] | None:
        """Any size."""
        return None

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
        """See :meth:`lightning_entrain.workload.costs.CostModel.layer_cost`."""
        times = self.layer_times(
            module, layer, load, training, tp=tp, cp=cp, rows_together=rows_together
        )
        trained = training.mode_of(module, layer) != "frozen"
        full = training.mode_of(module, layer) == "full"
        flows = training.needs_input_gradient(module, layer)
        kept, state = memory_cost(module, layer, load, training, tp=tp, cp=cp)
        linear = linear_flops(layer, load) / tp / cp
        pairs = attention_flops(layer, load) / tp / cp
        backward = linear * (float(flows) + float(full)) + 2.5 * pairs * float(flows or trained)
        return LayerCost(
            forward_ms=times.forward_ms,
            input_ms=times.input_ms,
            weight_ms=times.weight_ms,
            forward_flops=layer_flops(layer, load) / tp / cp,
            backward_flops=backward,
            saved_bytes=kept,
            state_bytes=state,
        )

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
        """See :meth:`lightning_entrain.workload.costs.CostModel.layer_times`."""
        check_parallelism(layer, tp=tp, cp=cp)
        share = 1.0 if rows_together is None else load.rows / rows_together
        entry_rows = load.rows if rows_together is None else np.full_like(load.rows, rows_together)
        speed_rows = entry_rows / cp
        matmul = self._matmul_ms(layer, load, speed_rows, training.dtype, tp) / cp
        attention = self._attention_ms(layer, load, training.dtype) / tp / cp
        moved = self._move_ms(layer, load, training, tp) / cp
        launch = layer.num_kernels * self.device.launch_ms * share
        talk = self._collective_ms(layer, load, training, tp, cp)

        trained = training.mode_of(module, layer) != "frozen"
        full = training.mode_of(module, layer) == "full"
        flows = training.needs_input_gradient(module, layer)
        forward = matmul + attention * (1 / ATTENTION_FORWARD) + moved + launch + talk
        zero = np.zeros_like(load.rows)
        backward_attention = attention * (2.5 / ATTENTION_BACKWARD)
        input_ms = matmul + backward_attention + 2 * moved + launch + talk if flows else zero
        weight_ms = matmul + 0.5 * launch if full else zero
        if not flows and trained:
            # Something inside the layer still needs the activations' gradients.
            inner = layer.attention is not None or len(layer.linears) > 1
            input_ms = 0.5 * matmul + backward_attention + moved if inner else zero
        if trained or flows:
            input_ms = input_ms + training.recomputed_forwards(module, layer) * forward
        return LayerTimes(forward_ms=forward, input_ms=input_ms, weight_ms=weight_ms)

    def _matmul_ms(
        self, layer: Layer, load: Load, speed_rows: FloatArray, dtype: str, tp: int
    ) -> FloatArray:
        """Forward matrix multiplications; each of the two backward ones takes as long."""
        total = np.zeros_like(load.rows)
        merge = load.merged / np.maximum(load.rows, 1e-9)
        for linear in layer.linears:
            merged = linear.axis is Axis.MERGED
            rows = load.merged if merged else load.rows
            together = speed_rows * merge if merged else speed_rows
            depth, columns = linear.in_features, linear.out_features
            if linear.shard is Shard.COLUMN:
                columns = -(-columns // tp)
            elif linear.shard is Shard.ROW:
                depth = -(-depth // tp)
            if linear.copies > 1:
                together = together * linear.active / linear.copies
            speed = self.device.matmul_tflops(together, depth, columns, dtype)
            total = total + 2.0 * depth * columns * linear.active * rows / (speed * 1e9)
        return total

    def _attention_ms(self, layer: Layer, load: Load, dtype: str) -> FloatArray:
        """Attention forward at the full peak; masked blocks are skipped."""
        if layer.attention is None:
            return np.zeros_like(load.rows)
        pairs = load.pairs[layer.attention.pattern]
        length = pairs / np.maximum(load.rows, 1e-9)
        operations = attention_flops(layer, load, skip_masked=True)
        slow = (length + ATTENTION_HALF_LENGTH) / np.maximum(length, 1e-9)
        time = operations * slow / (self.device.peak(dtype) * 1e9)
        return np.where(load.rows > 0, time, 0.0)

    def _move_ms(self, layer: Layer, load: Load, training: Training, tp: int) -> FloatArray:
        elements = layer.moved * load.rows + layer.moved_merged * load.merged
        if layer.attention is not None or layer.kind == "head":
            elements = elements / (0.5 * (1 + tp))  # norms run on every rank, the rest is split
        bandwidth = self.device.bandwidth_gbps * MOVE_EFFICIENCY * 1e6
        return elements * training.element_bytes / bandwidth

    def _collective_ms(
        self, layer: Layer, load: Load, training: Training, tp: int, cp: int
    ) -> FloatArray:
        """All-reduces behind row-split multiplications, and the ring of context parallelism."""
        link = (self.link_gbps or self.device.link_gbps) * LINK_EFFICIENCY * 1e6
        total = np.zeros_like(load.rows)
        if tp > 1:
            sums = sum(linear.shard is Shard.ROW for linear in layer.linears)
            width = next((x.in_features for x in layer.linears), 0)
            volume = sums * width * load.rows / cp * training.element_bytes
            total = total + 2 * (tp - 1) / tp * volume / link
        if cp > 1 and layer.attention is not None:
            volume = 2 * layer.attention.kv_width / tp * load.rows * training.element_bytes
            total = total + (cp - 1) / cp * volume / link
        return total
