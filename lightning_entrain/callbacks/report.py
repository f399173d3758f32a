"""Writes report.html at the end of a run, and tells the plan and the gain in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_entrain.assign.types import Assignment
from lightning_entrain.callbacks.batch_size import BatchSizeAdvisor
from lightning_entrain.callbacks.drift import CostModelDriftMonitor
from lightning_entrain.callbacks.memory import MemoryMonitor, predicted_gib
from lightning_entrain.callbacks.monitor import step_index
from lightning_entrain.callbacks.run_environment import run_environment
from lightning_entrain.callbacks.timeline import PipelineTimelineMonitor
from lightning_entrain.callbacks.traces import last_trace
from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor
from lightning_entrain.errors import EntrainError
from lightning_entrain.observe.advice import RunFacts, advise
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.counterfactual import (
    COMPARED,
    Pipeline,
    TrainedBatch,
    as_trained,
    compare_policies,
    in_sampler_order,
)
from lightning_entrain.observe.files import files_dir, write_text
from lightning_entrain.observe.history import StepHistory, history_of
from lightning_entrain.observe.plan_table import print_plan
from lightning_entrain.observe.rates import mean_settled, rate
from lightning_entrain.observe.run_page import OWN, SAMPLER_ORDER, run_page
from lightning_entrain.observe.run_record import (
    RECORD_FILE,
    REPORT_FILE,
    RunRecord,
    loads_by_microbatch,
    policies_to_dict,
)
from lightning_entrain.observe.step_page import rank_names
from lightning_entrain.observe.step_trace import stage_name
from lightning_entrain.observe.wandb_log import log_file
from lightning_entrain.runtime.multirun import job_name, under_hydra
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.schedule.types import Schedule
from lightning_entrain.workload.sizes import SampleSize

_Monitor = TypeVar("_Monitor", bound=Callback)


class RunReport(Callback):
    """Writes `report.html` and `run_record.json` when a fit ends, also with an exception.

    The page needs no network and no script. It shows what the other monitors of the trainer found:
    loss, variability against policy `fixed` on the same batches, load per microbatch, the last
    timeline measured and simulated, memory, plan, environment, and advice in plain words. Some of
    the trained batches are simulated under the policies `fixed`, `disttrain` and `entrain`, after
    training. It logs no values; a `WandbLogger` gets the page as an artifact. A folder that cannot
    be written costs a warning, not the run.

    Args:
        dirpath: Folder of both files; None takes the first logger's, as `ModelCheckpoint` does, or
            the trainer's `default_root_dir` without one.
        num_compared: Batches that the policies are compared on.
        name: Title of the report; None takes what sets the job of a Hydra sweep apart, or the
            folder's name.
        show_plan: Whether to print the plan when training starts.

    Attributes:
        record: Rank 0: the report's content, once it was written.
        path: Rank 0: the page, once it was written.
        earlier: What a run logged before this one resumed it; its series are shown too.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        num_compared: int = 12,
        name: str | None = None,
        show_plan: bool = True,
    ) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.num_compared = max(num_compared, 0)
        self.name = name
        self.show_plan = show_plan
        self.record: RunRecord | None = None
        self.path: Path | None = None
        self.earlier: RunRecord | None = None
        self._batches: list[TrainedBatch] = []
        self._stride = 1
        self._losses: dict[str, list[tuple[int, Tensor]]] = {}
        self._costs: BatchCosts | None = None
        self._facts: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what samples cost."""
        self._costs = BatchCosts.shared(trainer, pl_module)
        self._batches, self._stride, self._losses, self._facts = [], 1, {}, {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the plan."""
        plan = getattr(trainer.strategy, "plan", None)
        if self.show_plan and plan is not None and trainer.is_global_zero:
            print_plan(plan)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss, and now and then the batch's sizes."""
        if not trainer.is_global_zero:
            return
        step = step_index(trainer)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._keep_loss("train/loss", step, loss)
        if step % self._stride or self.num_compared == 0 or not hasattr(batch, "assignment"):
            return
        assert self._costs is not None
        assignment = self._costs.assignment_of(batch)
        self._batches.append(TrainedBatch(assignment=assignment, sizes=batch.sizes))
        if len(self._batches) > 2 * self.num_compared:
            self._batches = self._batches[::2]
            self._stride *= 2

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the validation's loss."""
        loss = trainer.callback_metrics.get("val/loss")
        if trainer.is_global_zero and not trainer.sanity_checking and isinstance(loss, Tensor):
            self._keep_loss("val/loss", max(trainer.global_step - 1, 0), loss)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what the strategy forgets when it is torn down."""
        if trainer.is_global_zero:
            self._facts = _strategy_facts(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report."""
        if trainer.is_global_zero:
            self._write(trainer, "finished")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write what is known so far."""
        if not trainer.is_global_zero or trainer.state.fn != "fit" or self._costs is None:
            return
        self._facts = self._facts or _strategy_facts(trainer)
        if isinstance(exception, SIGTERMException):
            # The checkpoint comes after this, and the time until the job is killed may be short.
            self._batches = []
        self._write(trainer, f"ended by {type(exception).__name__}: {exception}"[:300])

    def _keep_loss(self, key: str, step: int, loss: Tensor) -> None:
        values = self._losses.setdefault(key, [])
        values.append((step, loss.detach()))
        if len(values) > 4096:
            self._losses[key] = values[::2]

    def _write(self, trainer: pl.Trainer, status: str) -> None:
        try:
            record = self._make_record(trainer, status)
        except Exception as error:  # a report must not hide how the run ended
            rank_zero_warn(f"{REPORT_FILE} is not written: {type(error).__name__}: {error}")
            return
        self.record = record
        folder = self.dirpath or files_dir(trainer)
        write_text(folder / RECORD_FILE, record.to_json())
        self.path = write_text(folder / REPORT_FILE, run_page(record))
        if self.path is not None:
            log_file(trainer, self.path, kind="report")
            if not under_hydra():  # the apps tell at their end
                rank_zero_info(f"RunReport: {self.path}")

    def _make_record(self, trainer: pl.Trainer, status: str) -> RunRecord:
        folder = self.dirpath or files_dir(trainer)
        record = RunRecord(
            name=self.name or job_name() or folder.absolute().name,
            status=status,
            num_steps=trainer.global_step,
            environment=run_environment(trainer),
            predicted_memory_gib=predicted_gib(trainer),
            **self._facts,
        )
        history = history_of(trainer)
        record.series = _series(history)
        for key, values in self._losses.items():
            record.series[key] = [(step, float(loss)) for step, loss in values]
        if self.earlier is not None:
            for key, known in self.earlier.series.items():
                record.series[key] = known + record.series.get(key, [])
        if self._batches:
            record.policy = self._batches[-1].assignment.policy
        assert self._costs is not None
        record.load_unit = "ms" if self._costs.in_milliseconds else "patches or tokens"
        self._add_monitors(trainer, record)
        self._compare(trainer, record)
        record.advice = advise(self._run_facts(trainer, record))
        return record

    def _add_monitors(self, trainer: pl.Trainer, record: RunRecord) -> None:
        variability = _find(trainer, WorkloadVariabilityMonitor)
        if variability is not None:
            record.loads = loads_by_microbatch(list(variability.loads.steps.values()))
        memory = _find(trainer, MemoryMonitor)
        if memory is not None:
            record.memory_gib = memory.peaks_gib
        timeline, trace = _find(trainer, PipelineTimelineMonitor), last_trace(trainer)
        if timeline is None or trace is None or timeline.last_idle is None:
            return
        record.measured = trace.timeline
        record.rank_names = rank_names(trace)
        record.schedule = trace.replicas[0].schedule.name
        record.timeline_step = timeline.last_step
        record.idle = [
            [r.busy_ms, r.fill_drain_ms, r.imbalance_ms, r.communication_ms]
            for r in timeline.last_idle.ranks
        ]
        if timeline.last_predicted:
            record.simulated = Timeline.side_by_side(timeline.last_predicted)

    def _compare(self, trainer: pl.Trainer, record: RunRecord) -> None:
        pipeline = _pipeline(trainer)
        batches = self._batches[-self.num_compared :]
        assert self._costs is not None
        if pipeline is None or not batches or not self._costs.in_milliseconds:
            return
        record.num_compared = len(batches)
        own = as_trained(batches, pipeline)
        rows = {OWN: own}
        if record.policy != "fixed":
            with contextlib.suppress(EntrainError):
                rows[SAMPLER_ORDER] = in_sampler_order(batches, pipeline)
        record.policies = policies_to_dict({**rows, **compare_policies(batches, pipeline, own=own)})

    def _run_facts(self, trainer: pl.Trainer, record: RunRecord) -> RunFacts:
        drift, advisor = _find(trainer, CostModelDriftMonitor), _find(trainer, BatchSizeAdvisor)
        others = {n: float(row["step_ms"]) for n, row in record.policies.items() if n in COMPARED}
        stage_drift: dict[str, float] = {}
        if drift is not None and drift.times is not None:
            middle = drift.num_encoder_stages
            for stage in range(len(drift.times.measured_ms)):
                factor = 1 + drift.times.drift(range(stage, stage + 1))
                stage_drift[stage_name(stage, middle)] = factor
        plan = drift.suggestion if drift is not None else None
        parts = ("fill_drain", "imbalance", "communication")
        placement = getattr(_layout(trainer), "placement", None)
        return RunFacts(
            policy=record.policy,
            num_microbatches=int(record.last("variability/num_microbatches") or 0),
            num_stages=1 if placement is None else placement.num_ranks,
            bubble={part: mean_settled(record, f"pipeline/{part}_ratio") or 0.0 for part in parts},
            rank_names=record.rank_names,
            rank_busy_ms=[values[0] for values in record.idle],
            stage_drift=stage_drift,
            better_plan=plan.describe() if plan is not None else "",
            better_plan_gain=plan.gain if plan is not None else 0.0,
            policy_ms=others,
            policy_schedules={n: str(v.get("schedule", "")) for n, v in record.policies.items()},
            own_ms=record.policies[OWN]["step_ms"] if OWN in record.policies else 0.0,
            cv={
                "encoder": record.mean("variability/encoder_cv") or 0.0,
                "LLM": record.mean("variability/llm_cv") or 0.0,
            },
            data_wait_share=rate(record, "throughput/data_wait_share") or 0.0,
            planning_share=rate(record, "throughput/planning_share") or 0.0,
            batch_size_text=advisor.text if advisor is not None else "",
            global_batch_size=int(record.last("plan/global_batch_size") or 0),
            num_replicas=int(record.plan.get("dp", 1)),
            num_train_samples=advisor.num_train_samples if advisor is not None else 0,
            data_options="data." if under_hydra() else "",
        )


def _find(trainer: pl.Trainer, kind: type[_Monitor]) -> _Monitor | None:
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _layout(trainer: pl.Trainer) -> Any:
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "last_recorder"):
        return None
    try:
        return strategy.layout
    except RuntimeError:  # failed before it was known
        return None


def _strategy_facts(trainer: pl.Trainer) -> dict[str, Any]:
    layout, plan = _layout(trainer), getattr(trainer.strategy, "plan", None)
    return {
        "layout": "" if layout is None else layout.describe(),
        "plan": {} if plan is None else plan.to_dict(),
    }


def _pipeline(trainer: pl.Trainer) -> Pipeline | None:
    layout, shares = _layout(trainer), getattr(trainer.strategy, "stage_shares", None)
    if layout is None or shares is None or layout.num_ranks < 2:
        return None
    from lightning_entrain.runtime.step_plan import live_cap

    planner: Any = getattr(trainer.strategy, "step_planner", None)

    def own_schedule(assignment: Assignment, replica: int, sizes: Sequence[SampleSize]) -> Schedule:
        return replace(planner, replica=replica).train_schedule(assignment, sizes)[0]

    return Pipeline(
        placement=planner.placement,
        stage_shares=shares,
        stage_factors=planner.stage_factors,
        schedule=own_schedule,
        schedule_name=planner.schedule,
        max_live=live_cap(planner.placement),
    )


def _series(history: StepHistory) -> dict[str, list[tuple[int, float]]]:
    keys = sorted({key for row in history.rows.values() for key in row})
    return {key: history.series(key) for key in keys}
