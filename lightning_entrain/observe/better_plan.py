"""Whether other stages would suit what was measured better, and the cost model that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.plan.partition import Stages, partition_layers, stage_costs
from lightning_entrain.workload.costs import CostModel, LayerCost, LayerTimes
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import Load


@dataclass(frozen=True, kw_only=True)
class BetterPlan:
    """The best stages for given costs, beside the present ones.

    Attributes:
        encoder_layers: ``(start, stop)`` per encoder stage.
        llm_layers: The same for the LLM.
        gain: Part of the predicted step time that it saves; 0 where the present plan is best.
    """

    encoder_layers: Stages
    llm_layers: Stages
    gain: float

    def describe(self) -> str:
        """In words."""
        parts = []
        for name, layers in (("encoder", self.encoder_layers), ("LLM", self.llm_layers)):
            sizes = "+".join(str(stop - start) for start, stop in layers)
            parts.append(f"{len(layers)} {name} stage{'s' * (len(layers) > 1)} of {sizes} layers")
        return " and ".join(parts)


def better_plan(
    layout: StageLayout,
    encoder_ms: Sequence[float],
    llm_ms: Sequence[float],
    num_microbatches: int,
) -> BetterPlan:
    """Search all splits of a replica's ranks by ``sum + (K - 1) x busiest``.

    That is the second tier of Algorithm 2 (Entrain, section 4.3, arXiv 2605.27918), here with
    costs that were corrected by measurement.

    Args:
        layout: The present stages.
        encoder_ms: Time per encoder layer of a microbatch.
        llm_ms: Time per LLM layer.
        num_microbatches: K.
    """

    def step_ms(encoder: Stages, llm: Stages) -> float:
        times = (*stage_costs(encoder_ms, encoder), *stage_costs(llm_ms, llm))
        return sum(times) + (num_microbatches - 1) * max(times)

    now = step_ms(layout.encoder_ranges, layout.llm_ranges)
    best = now, layout.encoder_ranges, layout.llm_ranges
    if layout.num_ranks == layout.num_stages:
        for num_encoder in range(1, layout.num_ranks):
            num_llm = layout.num_ranks - num_encoder
            if num_encoder > len(encoder_ms) or num_llm > len(llm_ms):
                continue
            encoder = partition_layers(encoder_ms, num_encoder)
            llm = partition_layers(llm_ms, num_llm)
            found = step_ms(encoder, llm)
            if found < best[0] * (1 - 1e-9):
                best = found, encoder, llm
    gain = 1 - best[0] / now if now else 0.0
    return BetterPlan(encoder_layers=best[1], llm_layers=best[2], gain=gain)


def corrected_layers(
    layer_ms: Sequence[float], ranges: Stages, factors: Sequence[float]
) -> list[float]:
    """Predicted time per layer times its stage's measured / predicted."""
    corrected = list(layer_ms)
    for (start, stop), factor in zip(ranges, factors, strict=True):
        for layer in range(start, stop):
            corrected[layer] *= factor
    return corrected


@dataclass(frozen=True, kw_only=True)
class ScaledCostModel:
    """A cost model whose times are corrected by what was measured.

    Attributes:
        base: The model to correct.
        factors: Measured over predicted time, by module; modules without one stay.
    """

    base: CostModel
    factors: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name for tables."""
        parts = ", ".join(f"{module} x {factor:.3g}" for module, factor in self.factors.items())
        return f"{self.base.name}, refitted: {parts}"

    @property
    def tp_sizes(self) -> tuple[int, ...] | None:
        """Those of the model that is corrected."""
        return self.base.tp_sizes

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
        """As of any cost model."""
        cost = self.base.layer_cost(
            module, layer, load, training, tp=tp, cp=cp, rows_together=rows_together
        )
        return replace(cost, **self._scaled(module, cost))

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
        """As of any cost model."""
        times = self.base.layer_times(
            module, layer, load, training, tp=tp, cp=cp, rows_together=rows_together
        )
        return LayerTimes(**self._scaled(module, times))

    def _scaled(self, module: str, times: LayerTimes) -> dict[str, Any]:
        factor = self.factors.get(module, 1.0)
        return {
            "forward_ms": times.forward_ms * factor,
            "input_ms": times.input_ms * factor,
            "weight_ms": times.weight_ms * factor,
        }
