"""The plan of one run: what was asked for, what the model is, what the data makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.plan.layout import LayoutRequest, StageLayout
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.planning import (
    Workload,
    check_runnable,
    layout_of,
    stage_shares,
    workload_of,
)
from lightning_entrain.runtime.partition import ModelPartition, find_model, num_parameters
from lightning_entrain.runtime.schedules import check_schedule
from lightning_entrain.runtime.step_plan import StepPlanner
from lightning_entrain.workload.sizes import SampleSize


class RunPlan:
    """Fixes the layout of a run in two steps: by the model, then by the data.

    Args:
        wish: Replicas and stages the user asked for.
        given: A plan that the user gave, or None.
        schedule: Name of the training schedule.
        may_split: Whether B may be split into I and W.

    Attributes:
        plan: The plan in force; None while the layout follows the parameters alone.
        workload: What samples cost in the model; None for models without a configuration.
        partition: The model in stages; None until there is a model.
    """

    def __init__(
        self,
        wish: LayoutRequest,
        given: ParallelPlan | None,
        schedule: str,
        *,
        may_split: bool = True,
    ) -> None:
        wish.check_values()
        self.wish = wish if given is None else _merge(wish, given)
        self.given = given
        self.schedule = check_schedule(schedule, may_split=may_split)
        self.may_split = may_split
        self.plan = given
        self.workload: Workload | None = None
        self.partition: ModelPartition | None = None
        self._stage_shares: tuple[float, ...] | None = None

    @property
    def layout(self) -> StageLayout:
        """Stages, layers and ranks."""
        if self.partition is None:
            raise RuntimeError("The layout is known after the strategy was set up with a model")
        return self.partition.layout

    def check_ranks(self, world_size: int) -> None:
        """Check the wish against the number of devices, before there is a model."""
        if self.given is not None:
            check_runnable(self.given, world_size)
        self.wish = replace(self.wish, world_size=world_size)
        self.wish.ranks_per_replica()

    def check_model(self, module: Any) -> None:
        """Refuse a model that does not fit, if it is there already."""
        if isinstance(module, pl.LightningModule) and self.partition is None:
            model = existing_model(module)
            if model is not None:
                self._partition_of(module, model)

    def runs_as_one_stage(self, module: pl.LightningModule) -> bool:
        """Whether one process runs a module that has no EntrainModel to cut, as it is.

        Stages that were named, or a plan, ask for a model; :meth:`adopt` then refuses its absence.
        """
        named = self.wish.encoder_stages is not None or self.wish.llm_stages is not None
        if self.wish.world_size > 1 or named or self.given is not None:
            return False
        return sum(isinstance(part, EntrainModel) for part in module.modules()) != 1

    def forget(self) -> None:
        """There is no model to cut in the module that runs now."""
        self.partition = None
        self.workload = None

    def adopt(self, module: pl.LightningModule, device: torch.device, precision: str) -> None:
        """Take a module's model; the layout is provisional until the data is known.

        A model that ran before keeps its layout; see :meth:`adopt_again`.
        """
        known = self.partition is not None and self.partition.module is module
        if known and self.partition is not None and self.partition.pruned:
            return
        self.partition = None
        self.plan = self.given
        model = existing_model(module)
        if model is None:
            return
        self.partition = self._partition_of(module, model)
        self.workload = workload_of(model, device, precision=precision)

    def adopt_again(
        self, flags: Sequence[Mapping[str, bool]], device: torch.device, precision: str
    ) -> None:
        """Take the model for a further run: other parts may be trained now than before.

        Stages stay where they are. What they cost, and so assignments and schedules, is new.

        Args:
            flags: From every rank, which parameters of its stages are trained.
            device: Where the model runs.
            precision: Lightning's name.

        Raises:
            ConfigError: If ranks that hold the same parameter disagree on it.
        """
        assert self.partition is not None
        merged: dict[str, bool] = {}
        told_by: dict[str, int] = {}
        for rank, own in enumerate(flags):
            for name, trained in own.items():
                other = told_by.setdefault(name, rank)
                if merged.setdefault(name, trained) is not trained:
                    ranks = (rank, other) if trained else (other, rank)
                    raise ConfigError(
                        f"{name} is trained on rank {ranks[0]} and frozen on rank {ranks[1]}",
                        limit="all ranks train the same parameters",
                        remedy="freeze or thaw it on every rank",
                    )
        self.partition.set_flags(merged)
        self.workload = workload_of(self.partition.model, device, precision=precision)

    def refine(
        self,
        sizes: Sequence[SampleSize],
        *,
        global_batch_size: int,
        num_microbatches: int,
        ranks_per_node: int,
        from_rank_zero: Callable[[Callable[[], str | None]], str | None],
    ) -> None:
        """Choose stages by what the training samples cost, where the layout is still open.

        Args:
            sizes: The training samples.
            global_batch_size: Samples per optimizer step.
            num_microbatches: Microbatches per replica.
            ranks_per_node: Devices of one node.
            from_rank_zero: Runs a function on rank 0 and gives its result to all ranks.
        """
        if self.given is not None and self.given.global_batch_size != global_batch_size:
            rank_zero_warn(
                f"The plan is for global batches of {self.given.global_batch_size} samples in "
                f"{self.given.num_microbatches} microbatches, and the data module makes batches of "
                f"{global_batch_size}: its predictions do not hold. Set the data module's "
                f"global_batch_size to {self.given.global_batch_size}, or make another plan."
            )
        if self.workload is None or self.partition is None:
            return
        if self.plan is None and self.layout.num_ranks > 1 and not self.partition.pruned:
            text = from_rank_zero(
                lambda: self._search(sizes, global_batch_size, num_microbatches, ranks_per_node)
            )
            if text is not None:
                self.plan = ParallelPlan.from_json(text)  # checks its digest
                self.partition = self._partition_of(self.partition.module, self.partition.model)
        self._stage_shares = stage_shares(self.workload, self.layout, sizes)

    def step_planner(self, global_rank: int, dtype: str) -> StepPlanner:
        """The planner of a rank's steps.

        Args:
            global_rank: The rank.
            dtype: Name of the type of boundary tensors.
        """
        assert self.partition is not None
        layout = self.layout
        trained = self.partition.trained_stages()
        return StepPlanner(
            placement=replace(layout.placement, first_backward=trained.first_backward),
            replica=layout.split(global_rank)[0],
            schedule=self.schedule,
            boundary_columns=self.partition.model.boundary_columns(
                len(layout.encoder_ranges), len(layout.llm_ranges)
            ),
            dtype=dtype,
            stage_shares=self._stage_shares,
            stage_factors=trained.factors,
            # Operands kept from I to W would fill the memory that recomputation saves.
            may_split=self.may_split and not trained.recomputes,
        )

    def announce(self, loggers: Sequence[Any], global_batch_size: int | None) -> None:
        """Tell the user and the loggers; called on rank 0."""
        rank_zero_info(f"EntrainStrategy: {self.layout.describe()}; schedule {self.schedule}")
        if self.partition is not None and self.layout.num_ranks > 1:
            count, trained = self.partition.parameter_counts()
            rank_zero_info(
                f"EntrainStrategy: the whole model has {count:,} parameters, {trained:,} of them "
                "trained; Lightning's model summary shows rank 0's stages alone"
            )
        if self.plan is None:
            return
        if self.plan.limited_by:
            rank_zero_info(f"EntrainStrategy: predicted limit: {self.plan.limited_by}")
        b_min = self.plan.b_min
        if b_min is not None and global_batch_size is not None and global_batch_size < b_min:
            rank_zero_info(
                f"EntrainStrategy: the global batch of {global_batch_size} samples is smaller than "
                f"b_min {b_min}: single steps may need another split than the plan's"
            )
        for logger in loggers:
            logger.log_hyperparams({"plan": self.plan.to_dict()})

    def _partition_of(
        self, module: pl.LightningModule | None, model: EntrainModel
    ) -> ModelPartition:
        num_encoder, num_llm = model.encoder.num_layers, model.llm.num_layers
        if self.plan is not None:
            layout = layout_of(
                self.plan,
                num_ranks=self.wish.world_size,
                encoder_layers=num_encoder,
                llm_layers=num_llm,
            )
        else:
            layout = self.wish.resolve(
                encoder_layers=num_encoder,
                llm_layers=num_llm,
                encoder_weight=num_parameters(model.encoder),
                llm_weight=num_parameters(model.llm),
            )
        partition = ModelPartition(model, layout, module)
        partition.check()
        return partition

    def _search(
        self,
        sizes: Sequence[SampleSize],
        global_batch_size: int,
        num_microbatches: int,
        ranks_per_node: int,
    ) -> str | None:
        assert self.workload is not None
        named = self.wish.encoder_stages is not None or self.wish.llm_stages is not None
        layout = self.layout
        try:
            plan = self.workload.plan(
                sizes,
                num_ranks=self.wish.world_size,
                ranks_per_node=ranks_per_node,
                replicas=self.wish.replicas,
                global_batch_size=global_batch_size,
                num_microbatches=num_microbatches,
                encoder_stages=len(layout.encoder_ranges) if named else None,
                llm_stages=len(layout.llm_ranges) if named else None,
                placement=self.wish.placement,
            )
        except InfeasiblePlanError:
            if not named:
                raise
            return None  # predictions do not overrule stages that the user named
        return plan.to_json()


def existing_model(module: pl.LightningModule) -> EntrainModel | None:
    """The module's model, or None if ``configure_model`` will build it.

    Raises:
        ConfigError: If there is none and none will be, or more than one.
    """
    present = any(isinstance(part, EntrainModel) for part in module.modules())
    if not present and is_overridden("configure_model", module):
        return None
    return find_model(module)


def _merge(wish: LayoutRequest, plan: ParallelPlan) -> LayoutRequest:
    """The plan's numbers; options that contradict it are refused."""
    if wish.placement != "one_per_rank":
        raise ConfigError(
            f"placement={wish.placement} beside a plan",
            limit="a plan says which rank holds which stage",
            remedy="leave placement out, or the plan",
        )
    defaults = {"replicas": 1, "encoder_stages": None, "llm_stages": None}
    planned: dict[str, Any] = {
        "replicas": plan.dp,
        "encoder_stages": plan.encoder_stages,
        "llm_stages": plan.llm_stages,
    }
    for name, value in planned.items():
        given = getattr(wish, name)
        if given not in (value, defaults[name]):
            raise ConfigError(
                f"{name}={given} beside a plan with {name} {value}",
                limit="a plan sets replicas and stages",
                remedy=f"leave {name} out, or make another plan",
            )
    if plan.stage_to_rank is not None:  # stages and ranks are no longer the same number
        return replace(wish, replicas=plan.dp)
    return replace(wish, **planned)
