"""Logs how unevenly the microbatches of each step are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.assign.types import Assignment
from lightning_entrain.callbacks.monitor import StepMonitor, step_index
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.load_table import LoadTable
from lightning_entrain.observe.spread import Spread, microbatch_loads
from lightning_entrain.observe.spread_metric import SpreadMetric
from lightning_entrain.observe.wandb_log import define_sections, log_table, wandb_runs

MODULES = ("encoder", "llm")
_MAX_PENDING = 4096


class WorkloadVariabilityMonitor(StepMonitor):
    """Logs the spread of work over microbatches, every training step, to every logger.

    The spread is taken over all microbatches of the global batch, all replicas together, as in the
    paper's Table 3 (Entrain, section 6, arXiv 2605.27918). An empty microbatch counts as 0. Loads
    are the cost model's milliseconds, forward and backward; on a CPU its peak is nominal, so ratios
    are right and absolute values are not. For a model that the cost model does not know, loads are
    patches and tokens, and the keys ending in `_ms` are left out. With gradient accumulation, the
    last global batch of the step is the one logged.

    | key | meaning | unit |
    | --- | --- | --- |
    | `variability/encoder_cv` | std / mean of the encoder microbatches' loads | none |
    | `variability/encoder_std_ms` | their standard deviation | ms |
    | `variability/encoder_std` | the same of their patches | patches |
    | `variability/encoder_max_over_mean` | heaviest encoder microbatch / mean | none |
    | `variability/encoder_bound_gap` | heaviest load above its bound, worst replica | none |
    | `variability/encoder_replica_max_over_mean` | heaviest replica's total / mean | none |
    | `variability/fixed_encoder_cv` | `encoder_cv`, had policy `fixed` assigned this batch | none |
    | `variability/llm_cv` | std / mean of the LLM microbatches' loads | none |
    | `variability/llm_std_ms` | their standard deviation | ms |
    | `variability/llm_std` | the same of their tokens | tokens |
    | `variability/llm_max_over_mean` | heaviest LLM microbatch / mean | none |
    | `variability/llm_bound_gap` | heaviest load above its bound, worst replica | none |
    | `variability/llm_replica_max_over_mean` | heaviest replica's total / mean | none |
    | `variability/fixed_llm_cv` | `llm_cv`, had policy `fixed` assigned this batch | none |
    | `variability/encoder_llm_ratio` | encoder load / LLM load of the batch | none |
    | `variability/plan_encoder_llm_ratio` | the same in the plan's profile; absent without | none |
    | `variability/deferred_samples` | samples decoded a microbatch after their encoding | samples |
    | `variability/deferred_tokens` | their LLM tokens | tokens |
    | `variability/num_microbatches` | microbatches in use by the replica with most | none |

    The values are known on every rank from the sizes alone, so nothing is communicated. They are
    also in `trainer.callback_metrics`, for other callbacks to monitor. With a `WandbLogger`, the
    table `tables/microbatch_loads` holds each microbatch's load at evenly spread steps.

    Args:
        num_table_steps: Most steps whose loads are kept for the table and the report.

    Attributes:
        loads: The kept steps' loads.
    """

    def __init__(self, num_table_steps: int = 64) -> None:
        self.loads = LoadTable(max_steps=num_table_steps)
        self._run_loads: dict[str, list[float]] = {module: [] for module in MODULES}
        self._run_spread = {module: SpreadMetric() for module in MODULES}
        self._costs: BatchCosts | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what samples cost."""
        self._costs = BatchCosts.shared(trainer, pl_module)
        define_sections(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the spread of the batch that was just trained.

        Raises:
            ConfigError: If the batch does not say how it was planned.
        """
        costs = self._costs or BatchCosts.shared(trainer, pl_module)
        assignment = costs.assignment_of(batch)
        plan = getattr(trainer.strategy, "plan", None)
        values = measure(
            assignment,
            batch.sizes,
            in_milliseconds=costs.in_milliseconds,
            plan_shares=plan.proportions if plan is not None else None,
        )
        self.log_step(trainer, pl_module, values)
        if trainer.is_global_zero:
            for module in MODULES:
                self._run_loads[module] += all_loads(assignment, module)
                if len(self._run_loads[module]) > _MAX_PENDING:
                    self._take_in(module)
            self.loads.add(step_index(trainer), assignment)

    @property
    def run_spread(self) -> dict[str, SpreadMetric]:
        """Rank 0: per module the spread over all microbatches of the run so far."""
        for module in MODULES:
            self._take_in(module)
        return self._run_spread

    def _take_in(self, module: str) -> None:
        """Many loads at once: an update costs as much as all else that is done per step."""
        loads, self._run_loads[module] = self._run_loads[module], []
        self._run_spread[module].update(loads)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give W&B the loads of the kept steps as a table."""
        if trainer.is_global_zero and wandb_runs(trainer):
            log_table(trainer, "microbatch_loads", LoadTable.COLUMNS, self.loads.rows())


def measure(
    assignment: Assignment,
    sizes: Sequence[Any],
    *,
    in_milliseconds: bool,
    plan_shares: Any = None,
) -> dict[str, float]:
    """The values logged for one planned batch, by key.

    Args:
        assignment: With costs per sample.
        sizes: The samples' sizes by global-batch index.
        in_milliseconds: Whether the costs are milliseconds.
        plan_shares: Each module's share of the work in the plan's profile, if known.
    """
    num_microbatches = max((r.num_microbatches for r in assignment.replicas), default=1)
    fixed = assign_fixed(
        [size.has_images for size in sizes],
        num_replicas=len(assignment.replicas),
        num_microbatches=num_microbatches,
    ).with_costs(assignment.encoder_cost or (), assignment.llm_cost or ())
    rows = microbatch_loads(assignment, sizes)
    values: dict[str, float] = {}
    for module in MODULES:
        spread = assignment.imbalance(module)
        values[f"variability/{module}_cv"] = spread.cv
        if in_milliseconds:
            values[f"variability/{module}_std_ms"] = spread.std
        values[f"variability/{module}_std"] = Spread.of(getattr(rows, module)).std
        values[f"variability/{module}_max_over_mean"] = spread.max_over_mean
        values[f"variability/{module}_bound_gap"] = max(
            (bound.max_load_gap for bound in getattr(assignment.bounds, module)), default=0.0
        )
        across = assignment.replica_imbalance(module)
        values[f"variability/{module}_replica_max_over_mean"] = across.max_over_mean
        values[f"variability/fixed_{module}_cv"] = fixed.imbalance(module).cv
    values["variability/encoder_llm_ratio"] = _ratio(
        sum(assignment.encoder_cost or ()), sum(assignment.llm_cost or ())
    )
    if plan_shares and "encoder" in plan_shares and "llm" in plan_shares:
        values["variability/plan_encoder_llm_ratio"] = _ratio(
            plan_shares["encoder"], plan_shares["llm"]
        )
    deferred = [
        i
        for replica in assignment.replicas
        for (k, j), own in replica.segments().items()
        if j > k
        for i in own
    ]
    values["variability/deferred_samples"] = float(len(deferred))
    values["variability/deferred_tokens"] = float(sum(sizes[i].num_tokens for i in deferred))
    values["variability/num_microbatches"] = float(
        max(sum(1 for entry in r.llm if entry) for r in assignment.replicas)
    )
    return values


def all_loads(assignment: Assignment, module: str) -> list[float]:
    """Loads of one module's microbatches, all replicas one after the other."""
    loads = assignment.encoder_loads if module == "encoder" else assignment.llm_loads
    return [load for r in range(len(assignment.replicas)) for load in loads(r).tolist()]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
