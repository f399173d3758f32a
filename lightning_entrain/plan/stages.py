"""Time and memory of the stages of one module, for every way to cut it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.plan.partition import Stages, partition_layers
from lightning_entrain.plan.types import StagePrediction
from lightning_entrain.workload.costs import CostModel
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.memory import Training, stage_saved_bytes, state_bytes
from lightning_entrain.workload.shapes import Load, ModuleShape
from lightning_entrain.workload.tables import SizeTable

FloatArray = NDArray[np.float64]
_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class StageTotals:
    """Arrays ``[num_stages]`` for one module, one TP size and one microbatch size.

    Attributes:
        layers: Layer ranges.
        forward_ms: Forward of one microbatch.
        backward_ms: Backward of one microbatch.
        state_bytes: Weights, gradients, optimizer states per rank.
        saved_bytes: Kept per microbatch in flight, per rank.
        largest_bytes: The same for a microbatch with the largest sample in it.
        working_bytes: Needed once while a microbatch runs.
        gradient_bytes: Gradients to reduce over replicas.
    """

    layers: Stages
    forward_ms: FloatArray
    backward_ms: FloatArray
    state_bytes: FloatArray
    saved_bytes: FloatArray
    largest_bytes: FloatArray
    working_bytes: FloatArray
    gradient_bytes: FloatArray

    @property
    def time_ms(self) -> FloatArray:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass
class ModuleCosts:
    """Per-layer costs of one module at one (TP, CP, microbatch size), and stages cut from them.

    Prologue and epilogue cannot be stages of their own: their costs are folded into the first and
    the last block, which keeps the partition exact.

    Attributes:
        module: Shape of the module.
        load: One mean microbatch.
        largest: A microbatch that has the largest sample in it.
        training: What is trained.
        tp: Tensor-parallel ranks.
        forward_ms: Forward per block, ``[num_layers]``; so are the following.
        backward_ms: Backward.
        state: Bytes of weights, gradients and optimizer states.
        gradients: Bytes of gradients.
        saved: Bytes kept per mean microbatch.
        saved_largest: Bytes kept per microbatch with the largest sample.
        working: Bytes needed once while a microbatch runs.
    """

    module: ModuleShape
    load: Load
    largest: Load
    training: Training
    tp: int
    forward_ms: FloatArray
    backward_ms: FloatArray
    state: FloatArray
    gradients: FloatArray
    saved: FloatArray
    saved_largest: FloatArray
    working: FloatArray
    _stages: dict[int, StageTotals] = field(default_factory=dict)

    def stages(self, num_stages: int) -> StageTotals:
        """The partition with the smallest maximum of forward plus backward."""
        if num_stages not in self._stages:
            layers = partition_layers(self.forward_ms + self.backward_ms, num_stages)
            self._stages[num_stages] = self.cut(layers)
        return self._stages[num_stages]

    def cut(self, layers: Stages) -> StageTotals:
        """Totals of given layer ranges, which follow each other from 0."""
        bounds = np.array([start for start, _ in layers])

        def sums(values: FloatArray) -> FloatArray:
            return np.asarray(np.add.reduceat(values, bounds), dtype=np.float64)

        state, gradients = sums(self.state), sums(self.gradients)
        if len(layers) == 1:
            shared = sum(layer.shared_parameters for layer in self.module.layers) / self.tp
            total = state_bytes(self.module.name, self.module.layers, self.training, tp=self.tp)
            state = np.array([total.total])
            gradients = np.array([total.gradients]) if shared else gradients
        return StageTotals(
            layers=layers,
            forward_ms=sums(self.forward_ms),
            backward_ms=sums(self.backward_ms),
            state_bytes=state,
            saved_bytes=sums(self.saved),
            largest_bytes=sums(self.saved_largest),
            working_bytes=np.maximum.reduceat(self.working, bounds),
            gradient_bytes=gradients,
        )


def stage_predictions(
    modules: tuple[StageTotals, StageTotals],
    state: FloatArray,
    activations: FloatArray,
    buffers: FloatArray,
    in_flight: NDArray[np.int64],
) -> tuple[StagePrediction, ...]:
    """What a plan says of its stages.

    Args:
        modules: Stages of encoder and LLM.
        state: Bytes of weights, gradients and optimizer states per stage, encoder stages first;
            so are the following.
        activations: Bytes kept for backward by all microbatches in flight.
        buffers: Other bytes.
        in_flight: Microbatches whose activations are alive at most.
    """
    found: list[StagePrediction] = []
    for name, totals in zip(("encoder", "llm"), modules, strict=True):
        for index, (start, stop) in enumerate(totals.layers):
            stage = len(found)
            found.append(
                StagePrediction(
                    module=name,
                    start=start,
                    stop=stop,
                    forward_ms=float(totals.forward_ms[index]),
                    backward_ms=float(totals.backward_ms[index]),
                    state_gib=float(state[stage]) / _GIB,
                    activation_gib=float(activations[stage]) / _GIB,
                    buffer_gib=float(buffers[stage]) / _GIB,
                    in_flight=int(in_flight[stage]),
                )
            )
    return tuple(found)


def mean_microbatch(module: ModuleShape, table: SizeTable, microbatch_size: float) -> Load:
    """``microbatch_size`` samples of mean size: what balancing makes of every microbatch."""
    return module.load(table).sum().scaled(microbatch_size / len(table))


def largest_microbatch(module: ModuleShape, table: SizeTable, microbatch_size: float) -> Load:
    """A mean microbatch, or the largest sample alone where that is more."""
    load = module.load(table)
    mean = mean_microbatch(module, table, microbatch_size)
    top = int(load.rows.argmax())
    if load.rows[top] <= mean.rows[0]:
        return mean
    return Load(
        rows=load.rows[top : top + 1],
        merged=load.merged[top : top + 1],
        pairs={name: value[top : top + 1] for name, value in load.pairs.items()},
    )


def module_costs(
    module: ModuleShape,
    table: SizeTable,
    cost_model: CostModel,
    training: Training,
    *,
    tp: int,
    microbatch_size: float,
    cp: int = 1,
) -> ModuleCosts:
    """Costs of every layer of a module for a mean microbatch.

    Args:
        module: Shape of the module.
        table: Sizes of the samples.
        cost_model: Analytic or measured.
        training: What is trained.
        tp: Tensor-parallel ranks.
        microbatch_size: Samples per microbatch.
        cp: Context-parallel ranks.
    """
    load = mean_microbatch(module, table, microbatch_size)
    largest = largest_microbatch(module, table, microbatch_size)
    known: dict[Layer, FloatArray] = {}
    for layer in module.layers:
        if layer not in known:
            known[layer] = _layer_row(
                module.name, layer, load, largest, cost_model, training, tp=tp, cp=cp
            )
    rows = np.array([known[layer] for layer in module.blocks])
    for index, layers in ((0, module.prologue), (-1, module.epilogue)):
        for layer in layers:
            rows[index, :6] += known[layer][:6]
            rows[index, 6] = max(rows[index, 6], known[layer][6])
    forward, backward, state, gradients, saved, saved_largest, working = rows.T
    return ModuleCosts(
        module=module,
        load=load,
        largest=largest,
        training=training,
        tp=tp,
        forward_ms=forward,
        backward_ms=backward,
        state=state,
        gradients=gradients,
        saved=saved,
        saved_largest=saved_largest,
        working=working,
    )


def _layer_row(
    name: str,
    layer: Layer,
    load: Load,
    largest: Load,
    cost_model: CostModel,
    training: Training,
    *,
    tp: int,
    cp: int,
) -> FloatArray:
    """Times, bytes of state and gradients, bytes kept (mean, largest), working bytes: 7 numbers."""
    cost = cost_model.layer_cost(name, layer, load, training, tp=tp, cp=cp)
    state = state_bytes(name, [layer], training, tp=tp)
    kept = stage_saved_bytes(name, [layer], load, training, tp=tp) / cp
    top = stage_saved_bytes(name, [layer], largest, training, tp=tp) / cp
    working = float(cost.saved_bytes[0]) if training.recompute else 0.0
    if layer.kind == "head":
        # Logits and their gradient, in the model's dtype and in fp32.
        wide = layer.linears[0].out_features / tp
        working = (2 * training.element_bytes + 8) * wide * float(largest.rows[0]) / cp
    times = (float(cost.forward_ms[0]), float(cost.backward_ms[0]))
    return np.array([*times, state.total, state.gradients, float(kept[0]), float(top[0]), working])
