"""Compares what the cost model predicted with what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_entrain.callbacks.monitor import (
    StepMonitor,
    check_interval,
    is_due,
    step_ends,
    step_index,
)
from lightning_entrain.callbacks.traces import note_step, step_trace
from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.better_plan import (
    BetterPlan,
    ScaledCostModel,
    better_plan,
    corrected_layers,
)
from lightning_entrain.observe.predicted import StageTimes, predicted_timelines
from lightning_entrain.observe.step_trace import stage_name
from lightning_entrain.observe.wandb_log import define_sections
from lightning_entrain.planning import Workload

_NUM_LOOKS = 3


class CostModelDriftMonitor(StepMonitor):
    """Logs the cost model's error on every stage, and warns where it misleads the plan.

    Predictions are first stretched by one factor for the whole model, `plan/time_scale`, for only
    ratios decide where samples and layers go (on a CPU the model's peak is nominal). Values are
    over all looks so far. Needs `EntrainStrategy` and a model whose costs are known; otherwise
    nothing is logged.

    | key | meaning | unit |
    | --- | --- | --- |
    | `plan/time_scale` | measured / predicted time of the whole model | none |
    | `plan/prediction_error` | mean distance of an action from its stretched prediction | none |
    | `plan/encoder_drift` | encoder's measured / stretched predicted time, minus 1 | none |
    | `plan/llm_drift` | the same of the LLM | none |
    | `plan/better_plan_gain` | part of the step time that the best other stages would save | none |

    Args:
        every_n_steps: Steps between two looks; the first is at step 3, counted from 0.
        tolerance: Drift of a stage above which it warns, once.
        min_gain: Gain above which it names the better plan, once.

    Attributes:
        times: Rank 0: measured and predicted time per stage so far; None before the first look.
        suggestion: Rank 0: the best stages by what was measured; None before the first look.

    Raises:
        ConfigError: If an argument is out of range.
    """

    def __init__(
        self, every_n_steps: int = 20, tolerance: float = 0.25, min_gain: float = 0.05
    ) -> None:
        self.every_n_steps = check_interval(every_n_steps)
        for name, value in (("tolerance", tolerance), ("min_gain", min_gain)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}", limit="above 0")
        self.tolerance = tolerance
        self.min_gain = min_gain
        self.times: StageTimes | None = None
        self.suggestion: BetterPlan | None = None
        self._num_looks = 0
        self._warned = False
        self.num_encoder_stages = 1
        self._costs: BatchCosts | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what samples cost."""
        self._costs = BatchCosts.shared(trainer, pl_module)
        self.times, self.suggestion = None, None
        self._num_looks, self._warned = 0, False
        define_sections(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Compare where it is due."""
        if not step_ends(trainer) or not is_due(step_index(trainer), self.every_n_steps):
            return
        shares = getattr(trainer.strategy, "stage_shares", None)
        assert self._costs is not None
        if shares is None or not self._costs.in_milliseconds:
            return
        note_step(trainer)
        values = trainer.strategy.broadcast(self._look(trainer, batch, shares))
        if values:
            self.log_step(trainer, pl_module, values)

    def refitted(self) -> Workload | None:
        """The workload with each module's time corrected by what was measured, on rank 0.

        None before the first look and on other ranks. A plan for the next run can be made of it.
        """
        workload = self._costs.workload if self._costs is not None else None
        if workload is None or self.times is None:
            return None
        middle = self.num_encoder_stages
        factors = {}
        for name, part in (("encoder", slice(None, middle)), ("llm", slice(middle, None))):
            predicted = sum(self.times.predicted_ms[part])
            factors[name] = sum(self.times.measured_ms[part]) / predicted if predicted else 1.0
        return replace(
            workload, cost_model=ScaledCostModel(base=workload.cost_model, factors=factors)
        )

    def _look(self, trainer: pl.Trainer, batch: Any, shares: Any) -> dict[str, float]:
        trace = step_trace(trainer)
        if trace is None:
            return {}
        assert self._costs is not None
        assignment = self._costs.assignment_of(batch)
        factors = getattr(trainer.strategy, "stage_factors", None)
        fresh = StageTimes.of(
            trace, predicted_timelines(trace, assignment, batch.sizes, shares, factors)
        )
        self.times = fresh if self.times is None else self.times.add(fresh)
        self._num_looks += 1
        placement = trace.replicas[0].schedule.placement
        self.num_encoder_stages = placement.num_encoder_stages
        encoder = range(placement.num_encoder_stages)
        llm = range(placement.num_encoder_stages, placement.num_stages)
        num_microbatches = max(r.rows.num_microbatches for r in trace.replicas)
        self.suggestion = self._suggest(trainer, batch, num_microbatches)
        self._warn()
        return {
            "plan/time_scale": self.times.scale,
            "plan/prediction_error": self.times.relative_error,
            "plan/encoder_drift": self.times.drift(encoder),
            "plan/llm_drift": self.times.drift(llm),
            "plan/better_plan_gain": self.suggestion.gain,
        }

    def _suggest(self, trainer: pl.Trainer, batch: Any, num_microbatches: int) -> BetterPlan:
        layout: Any = getattr(trainer.strategy, "layout", None)
        assert self._costs is not None
        assert self._costs.workload is not None
        assert self.times is not None
        encoder_ms, llm_ms = self._costs.workload.layer_ms(batch.sizes)
        factors, middle = self.times.stage_factors(), layout.num_encoder_stages
        return better_plan(
            layout,
            corrected_layers(encoder_ms, layout.encoder_ranges, factors[:middle]),
            corrected_layers(llm_ms, layout.llm_ranges, factors[middle:]),
            num_microbatches,
        )

    def _warn(self) -> None:
        if self._warned or self._num_looks < _NUM_LOOKS:
            return
        text = drift_text(self.times, self.num_encoder_stages, self.tolerance)
        if self.suggestion is not None and self.suggestion.gain > self.min_gain:
            text += (
                f" By what was measured, {self.suggestion.describe()} would take about "
                f"{self.suggestion.gain:.0%} less time per step."
            )
        if text:
            self._warned = True
            rank_zero_warn(f"CostModelDriftMonitor:{text}")


def drift_text(times: StageTimes | None, num_encoder_stages: int, tolerance: float) -> str:
    """Names the stages that took longer or shorter than predicted; empty within the tolerance."""
    if times is None:
        return ""
    text = ""
    for stage in range(len(times.measured_ms)):
        drift = times.drift(range(stage, stage + 1))
        if abs(drift) > tolerance:
            name = stage_name(stage, num_encoder_stages)
            text += f" {name} took {1 + drift:.2f} times as long as predicted."
    return text
