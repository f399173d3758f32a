"""Logs how unevenly the microbatches of each step are loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_entrain.assign.bounds import least_max_load
from lightning_entrain.assign.measures import imbalance
from lightning_entrain.assign.numbers import loads_of
from lightning_entrain.assign.runs import even_runs
from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.callbacks.monitor import StepMonitor, step_index
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.load_table import LoadTable
from lightning_entrain.observe.spread_metric import SpreadMetric
from lightning_entrain.observe.wandb_log import define_sections, log_table, wandb_runs
from lightning_entrain.workload.tables import SizeTable

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
        loads = loads_by_replica(assignment)
        values = measure(
            assignment,
            batch.sizes,
            in_milliseconds=costs.in_milliseconds,
            plan_shares=plan.proportions if plan is not None else None,
            table=costs.table_of(batch),
            loads=loads,
        )
        self.log_step(trainer, pl_module, values)
        if trainer.is_global_zero:
            for module in MODULES:
                kept = self._run_loads[module]
                kept += [load for own in loads[module] for load in own]
                if len(kept) > _MAX_PENDING:
                    self._take_in(module)
            self.loads.add(step_index(trainer), loads)

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


Loads = dict[str, list[list[float]]]
"""Per module and replica the loads of its microbatches, in the unit of the costs."""


def loads_by_replica(assignment: Assignment) -> Loads:
    """Loads of all microbatches of an assignment that knows its costs."""
    replicas = assignment.replicas
    return {
        "encoder": [loads_of(assignment.encoder_cost or (), r.encoder) for r in replicas],
        "llm": [loads_of(assignment.llm_cost or (), r.llm) for r in replicas],
    }


def measure(
    assignment: Assignment,
    sizes: Sequence[Any],
    *,
    in_milliseconds: bool,
    plan_shares: Any = None,
    table: SizeTable | None = None,
    loads: Loads | None = None,
) -> dict[str, float]:
    """The values logged for one planned batch, by key.

    Args:
        assignment: With costs per sample.
        sizes: The samples' sizes by global-batch index.
        in_milliseconds: Whether the costs are milliseconds.
        plan_shares: Each module's share of the work in the plan's profile, if known.
        table: The sizes as arrays, if they are known already.
        loads: The loads, if they are known already.
    """
    table = SizeTable.from_sizes(sizes) if table is None else table
    loads = loads_by_replica(assignment) if loads is None else loads
    patches, tokens = table.num_patches.tolist(), table.num_tokens.tolist()
    values: dict[str, float] = {}
    for module, rows in (("encoder", patches), ("llm", tokens)):
        values.update(_module_values(assignment, module, rows, loads[module]))
        if not in_milliseconds:
            del values[f"variability/{module}_std_ms"]
    values["variability/encoder_llm_ratio"] = _ratio(
        sum(assignment.encoder_cost or ()), sum(assignment.llm_cost or ())
    )
    if plan_shares and "encoder" in plan_shares and "llm" in plan_shares:
        values["variability/plan_encoder_llm_ratio"] = _ratio(
            plan_shares["encoder"], plan_shares["llm"]
        )
    deferred = [i for replica in assignment.replicas for i in _deferred(replica)]
    values["variability/deferred_samples"] = float(len(deferred))
    values["variability/deferred_tokens"] = float(sum(tokens[i] for i in deferred))
    values["variability/num_microbatches"] = float(
        max(sum(1 for entry in r.llm if entry) for r in assignment.replicas)
    )
    return values


def _module_values(
    assignment: Assignment, module: str, rows: Sequence[int], loads: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Values of one module; `rows` are its samples' patches or tokens."""
    costs = (assignment.encoder_cost if module == "encoder" else assignment.llm_cost) or ()
    replicas = assignment.replicas
    spread = imbalance([load for own in loads for load in own])
    row_spread = imbalance(loads_of(rows, [e for r in replicas for e in getattr(r, module)]))
    gaps = [0.0]
    for replica, own in zip(replicas, loads, strict=True):
        bound = least_max_load([costs[i] for entry in replica.llm for i in entry], len(own))
        gaps.append(max(own) / bound - 1 if bound > 0 else 0.0)
    num_microbatches = max((r.num_microbatches for r in replicas), default=1)
    worked = [cost if count else 0.0 for cost, count in zip(costs, rows, strict=True)]
    fixed = imbalance(
        [
            math.fsum(worked[first:last])
            for start, stop in even_runs(0, len(worked), len(replicas))
            for first, last in even_runs(start, stop, num_microbatches)
        ]
    )
    return {
        f"variability/{module}_cv": spread.cv,
        f"variability/{module}_std_ms": spread.std,
        f"variability/{module}_std": row_spread.std,
        f"variability/{module}_max_over_mean": spread.max_over_mean,
        f"variability/{module}_bound_gap": max(gaps),
        f"variability/{module}_replica_max_over_mean": imbalance(
            [math.fsum(own) for own in loads]
        ).max_over_mean,
        f"variability/fixed_{module}_cv": fixed.cv,
    }


def _deferred(replica: ReplicaAssignment) -> list[int]:
    """Samples decoded in a later microbatch than they are encoded in."""
    decoded = {i: j for j, entry in enumerate(replica.llm) for i in entry}
    return [i for k, entry in enumerate(replica.encoder) for i in entry if decoded[i] > k]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
