"""What samples and layers cost in a simulation: whole layers by FLOPs, or by a cost model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.stages import ModuleCosts, mean_microbatch, module_costs
from lightning_entrain.workload.costs import CostModel, sample_costs
from lightning_entrain.workload.flops import layer_flops, sample_flops
from lightning_entrain.workload.hardware import Device
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import FloatArray, Load, ModelShape, ModuleShape
from lightning_entrain.workload.tables import SizeTable

COST_KINDS = ("model", "flops")
"""``model``: the analytic or measured cost model. ``flops``: forward operations at the device's
best speed, each of I and W as long as F."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Costs of a module's layers for a mean microbatch, arrays ``[num_layers]``.

    Prologue and epilogue belong to the first and the last layer, for they run there.

    Attributes:
        phase_ms: F, I and W, ``[num_layers, 3]``.
        last_epilogue_ms: Of the last layer's, what the epilogue takes, ``[3]``.
        memory: Bytes of state, activations and working space.
    """

    phase_ms: FloatArray
    last_epilogue_ms: FloatArray
    memory: ModuleCosts

    @property
    def total_ms(self) -> FloatArray:
        """F, I and W together, ``[num_layers]``."""
        return np.asarray(self.phase_ms.sum(axis=1), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Costing:
    """One way to predict time.

    Attributes:
        kind: One of :data:`COST_KINDS`.
        model: Shape of the model.
        device: The accelerator.
        cost_model: For ``model``.
        training: What is trained.
        encoder_tp: Tensor-parallel ranks of an encoder stage.
        llm_tp: Tensor-parallel ranks of an LLM stage.
        microbatch_size: Samples that run together on average.
    """

    kind: str
    model: ModelShape
    device: Device
    cost_model: CostModel
    training: Training = field(default_factory=Training)
    encoder_tp: int = 1
    llm_tp: int = 1
    microbatch_size: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in COST_KINDS:
            raise ConfigError(f"costs is {self.kind!r}", limit=f"one of {', '.join(COST_KINDS)}")

    @property
    def name(self) -> str:
        """For people."""
        if self.kind == "flops":
            return f"FLOPs of whole layers, backward = 2 x forward ({self.device.name})"
        return self.cost_model.name

    def sample_ms(self, table: SizeTable) -> tuple[FloatArray, FloatArray]:
        """Milliseconds of F, I and W of each sample in encoder and LLM, each ``[num_samples]``."""
        if self.kind == "flops":
            encoder, llm = sample_flops(self.model, table)
            return (
                3 * encoder * self._ms_per_flop(self.encoder_tp),
                3 * llm * self._ms_per_flop(self.llm_tp),
            )
        costs = sample_costs(
            self.model,
            table,
            self.cost_model,
            self.training,
            encoder_tp=self.encoder_tp,
            llm_tp=self.llm_tp,
            microbatch_size=self.microbatch_size,
        )
        return costs.encoder_ms, costs.llm_ms

    def blocks(self, table: SizeTable) -> tuple[Blocks, Blocks]:
        """Costs per layer of encoder and LLM for a mean microbatch of these samples."""
        encoder, llm = self.model.modules
        return self._blocks(encoder, table, self.encoder_tp), self._blocks(llm, table, self.llm_tp)

    def _blocks(self, module: ModuleShape, table: SizeTable, tp: int) -> Blocks:
        load = mean_microbatch(module, table, self.microbatch_size)
        known: dict[Layer, FloatArray] = {}
        for layer in module.layers:
            if layer not in known:
                known[layer] = self._phases(module.name, layer, load, tp)
        phases = np.array([known[layer] for layer in module.blocks])
        for layer in module.prologue:
            phases[0] += known[layer]
        epilogue = np.sum([known[layer] for layer in module.epilogue] or [np.zeros(3)], axis=0)
        phases[-1] += epilogue
        memory = module_costs(
            module,
            table,
            self.cost_model,
            self.training,
            tp=tp,
            microbatch_size=self.microbatch_size,
        )
        return Blocks(phase_ms=phases, last_epilogue_ms=epilogue, memory=memory)

    def _phases(self, name: str, layer: Layer, load: Load, tp: int) -> FloatArray:
        if self.kind == "flops":
            forward = float(layer_flops(layer, load)[0]) * self._ms_per_flop(tp)
            return np.full(3, forward)
        cost = self.cost_model.layer_cost(name, layer, load, self.training, tp=tp)
        return np.array([cost.forward_ms[0], cost.input_ms[0], cost.weight_ms[0]])

    def _ms_per_flop(self, tp: int) -> float:
        speed = self.device.peak(self.training.dtype) * self.device.matmul_efficiency
        return 1.0 / (speed * 1e9 * tp)
