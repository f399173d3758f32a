"""Logs how much of the ranks' time is idle, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_entrain.assign.types import Assignment
from lightning_entrain.callbacks.monitor import (
    StepMonitor,
    check_interval,
    is_due,
    step_ends,
    step_index,
)
from lightning_entrain.callbacks.traces import has_pipeline, note_step, step_trace
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.chrome_trace import chrome_trace
from lightning_entrain.observe.files import files_dir, write_text
from lightning_entrain.observe.idle import StepIdle, durations_of, load_search, split_idle
from lightning_entrain.observe.predicted import predicted_timelines
from lightning_entrain.observe.spread_metric import SpreadMetric
from lightning_entrain.observe.step_page import timeline_page
from lightning_entrain.observe.step_trace import StepTrace
from lightning_entrain.observe.wandb_log import define_sections, log_file, log_page, wandb_runs
from lightning_entrain.runtime.schedules import AUTO
from lightning_entrain.schedule.timeline import Timeline

TRACE_FILE = "trace.json"
PLAN_FILE = "plan.json"


class PipelineTimelineMonitor(StepMonitor):
    """Logs the idle time of the pipeline, every n steps, as it was measured on all ranks.

    Each of the three parts is a share of all ranks' time, and they add up to the bubble (see
    :func:`~lightning_entrain.observe.idle.split_idle`). Without `EntrainStrategy` there is no
    pipeline, and nothing is logged.

    | key | meaning | unit |
    | --- | --- | --- |
    | `pipeline/bubble_ratio` | share of all ranks' time without compute | none |
    | `pipeline/fill_drain_ratio` | of it, what the best schedule costs with all work equal | none |
    | `pipeline/imbalance_ratio` | of it, what unequal work costs | none |
    | `pipeline/communication_ratio` | of it, what transfers and overhead cost | none |
    | `pipeline/rank<r>_bubble_ratio` | share of rank r's time without compute | none |
    | `pipeline/step_ms` | first begin to the end of the last compute action | ms |
    | `pipeline/predicted_bubble_ratio` | the bubble in simulated time, if costs are known | none |
    | `variability/encoder_measured_cv` | std / mean of measured encoder microbatches | none |
    | `variability/encoder_measured_std_ms` | its standard deviation | ms |
    | `variability/llm_measured_cv` | std / mean of measured LLM microbatches | none |
    | `variability/llm_measured_std_ms` | its standard deviation | ms |

    The plan is written as `plan.json` when training starts, and the last step as a Chrome trace,
    `trace.json`, when it ends. A `WandbLogger` gets both as artifacts, and a picture of a step as
    `pipeline/timeline` now and then.

    Args:
        every_n_steps: Steps between two looks; the first is at step 3, counted from 0, and the
            last step is looked at, too.
        picture_every_n_steps: Steps between two pictures for W&B.
        dirpath: Folder of both files; None takes the first logger's, as `ModelCheckpoint` does, or
            the trainer's `default_root_dir` without one.

    Attributes:
        last_idle: Rank 0: idle time of the last step that was looked at.
        last_predicted: Rank 0: the same step in simulated time, by replica; empty without costs.

    Raises:
        ConfigError: If an interval is below 1.
    """

    def __init__(
        self,
        every_n_steps: int = 20,
        picture_every_n_steps: int = 100,
        dirpath: str | Path | None = None,
    ) -> None:
        self.every_n_steps = check_interval(every_n_steps)
        self.picture_every_n_steps = check_interval(picture_every_n_steps)
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.last_idle: StepIdle | None = None
        self.last_predicted: tuple[Timeline, ...] = ()
        self.last_step = -1
        self._looked_at = -1
        self._batch: Any = None
        self._costs: BatchCosts | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what samples cost."""
        self._costs = BatchCosts.shared(trainer, pl_module)
        define_sections(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the plan, if there is one, and load what looks need."""
        if has_pipeline(trainer) and trainer.is_global_zero:
            load_search()
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not None and trainer.is_global_zero:
            self._keep(trainer, PLAN_FILE, plan.to_json(), kind="plan")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look at the step where it is due."""
        if not has_pipeline(trainer):
            return
        self._batch = batch
        note_step(trainer)
        step = self.last_step = step_index(trainer)
        if not step_ends(trainer) or not is_due(step, self.every_n_steps):
            return
        self._looked_at = step
        values = trainer.strategy.broadcast(self._look(trainer))
        if values:
            self.log_step(trainer, pl_module, values)
        if self.last_idle is not None and is_due(step, self.picture_every_n_steps):
            self._log_picture(trainer, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the last step in any case, and write its trace."""
        if not has_pipeline(trainer) or self._batch is None:
            return
        if self._looked_at != self.last_step:
            self._looked_at = self.last_step
            values = trainer.strategy.broadcast(self._look(trainer))
            if values:
                self.log_step(trainer, pl_module, values, at_end_of=self.last_step)
        trace = step_trace(trainer)
        if trace is None:
            return
        record = chrome_trace(
            [replica.timeline for replica in trace.replicas],
            name=f"step {max(trainer.global_step - 1, 0)}",
        )
        self._keep(trainer, TRACE_FILE, json.dumps(record, separators=(",", ":")), kind="trace")

    def _keep(self, trainer: pl.Trainer, name: str, text: str, *, kind: str) -> None:
        """Write a file, and give it to W&B."""
        path = write_text((self.dirpath or files_dir(trainer)) / name, text)
        if path is not None and wandb_runs(trainer):
            log_file(trainer, path, kind=kind)

    def _look(self, trainer: pl.Trainer) -> dict[str, float]:
        """Values of the step on rank 0; nothing on other ranks."""
        trace = step_trace(trainer)
        if trace is None:
            return {}
        assert self._costs is not None
        assignment = self._costs.assignment_of(self._batch)
        planner = getattr(trainer.strategy, "step_planner", None)
        chooses = planner is not None and planner.schedule == AUTO and planner.may_split
        self.last_idle = split_idle(trace, may_split=chooses)
        self.last_predicted = self._predict(trainer, trace, assignment)
        return measured_values(trace, self.last_idle, self.last_predicted)

    def _predict(
        self, trainer: pl.Trainer, trace: StepTrace, assignment: Assignment
    ) -> tuple[Timeline, ...]:
        shares = getattr(trainer.strategy, "stage_shares", None)
        assert self._costs is not None
        if shares is None or not self._costs.in_milliseconds:
            return ()
        factors = getattr(trainer.strategy, "stage_factors", None)
        return predicted_timelines(trace, assignment, self._batch.sizes, shares, factors)

    def _log_picture(self, trainer: pl.Trainer, step: int) -> None:
        trace = step_trace(trainer)
        if trace is None or self.last_idle is None or not wandb_runs(trainer):
            return
        page = timeline_page(trace, self.last_predicted, self.last_idle, step)
        log_page(trainer, "pipeline/timeline", page, step)


def measured_values(
    trace: StepTrace, idle: StepIdle, predicted: tuple[Timeline, ...]
) -> dict[str, float]:
    """The values logged for one step, by key."""
    values = {
        "pipeline/bubble_ratio": idle.bubble_ratio,
        "pipeline/fill_drain_ratio": idle.fill_drain_ratio,
        "pipeline/imbalance_ratio": idle.imbalance_ratio,
        "pipeline/communication_ratio": idle.communication_ratio,
        "pipeline/step_ms": idle.step_ms,
    }
    for number, rank in enumerate(idle.ranks):
        values[f"pipeline/rank{number}_bubble_ratio"] = (
            rank.idle_ms / idle.step_ms if idle.step_ms else 0.0
        )
    if predicted:
        values["pipeline/predicted_bubble_ratio"] = Timeline.side_by_side(predicted).bubble_ratio
    for module, metric in measured_spread(trace).items():
        spread = metric.spread()
        values[f"variability/{module}_measured_cv"] = spread.cv
        values[f"variability/{module}_measured_std_ms"] = spread.std
    return values


def measured_spread(trace: StepTrace) -> dict[str, SpreadMetric]:
    """Per module the spread over all microbatches of the time that its stages took."""
    metrics = {"encoder": SpreadMetric(), "llm": SpreadMetric()}
    for replica in trace.replicas:
        placement, count = replica.schedule.placement, replica.rows.num_microbatches
        loads = {module: [0.0] * count for module in metrics}
        for (_, action), duration in durations_of(replica).items():
            module = "encoder" if action.stage < placement.num_encoder_stages else "llm"
            loads[module][action.microbatch] += duration
        for module, metric in metrics.items():
            metric.update(loads[module])
    return metrics
