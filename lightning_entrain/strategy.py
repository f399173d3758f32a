"""The Lightning strategy: a heterogeneous pipeline over encoder and LLM ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_entrain.checkpoint.optimizer_state import (
    OptimizerLayout,
    prune_optimizer,
    record_layout,
)
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.planned import Costs
from lightning_entrain.models.batch_check import check_rows
from lightning_entrain.plan.layout import LayoutRequest, StageLayout
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.plan_file import read_plan
from lightning_entrain.planning import Workload
from lightning_entrain.runtime.engine import PipelineEngine
from lightning_entrain.runtime.finite import FiniteCheck
from lightning_entrain.runtime.gradients import (
    copy_from_first_replica,
    sum_over_replicas,
)
from lightning_entrain.runtime.groups import create_groups
from lightning_entrain.runtime.launcher import EntrainLauncher, check_not_interactive
from lightning_entrain.runtime.partition import ModelPartition, find_model
from lightning_entrain.runtime.precision import WIRE_DTYPES, PipelinePrecision
from lightning_entrain.runtime.recorder import StepRecorder
from lightning_entrain.runtime.run_plan import RunPlan
from lightning_entrain.runtime.step_plan import StepPlan, StepPlanner
from lightning_entrain.runtime.stopping import INTERRUPTED
from lightning_entrain.runtime.ties import TiedCopies, create_tie_groups

__all__ = ["INTERRUPTED", "EntrainStrategy"]

_Result = TypeVar("_Result")


class EntrainStrategy(PipelinePrecision):
    """Trains a vision-language model as a pipeline whose first stages hold the encoder.

    The LightningModule stays plain: it holds one :class:`EntrainModel` and its ``training_step``
    is ``loss = self.model(batch); self.log("train/loss", loss); return loss``. Batches come from an
    :class:`EntrainDataModule`. Implements the execution of Entrain (arXiv 2605.27918), section 5.

    Args:
        encoder_stages: Encoder stages per replica. None: planned from the data and the model, or in
            proportion to the parameters where the batches do not come from a data module.
        llm_stages: LLM stages per replica. None: the ranks that are left.
        replicas: Data-parallel copies of the pipeline. Devices = replicas x stages; with one device
            per replica, that device runs all stages.
        placement: ``"one_per_rank"``: a rank holds layers of one module. ``"shared_boundary"``: one
            rank may hold the encoder's last and the LLM's first layers, which evens the ranks.
            ``"v_shaped"``: two chunks per rank, down the ranks and back up. ``"colocated"``: a
            stage of each module on every rank. All but the first decide the stages themselves.
        plan: A plan, or the file that ``entrain-plan`` wrote; sets replicas, stages, their layers
            and the number of microbatches.
        schedule: ``"auto"`` simulates all schedules for every step and takes the fastest;
            ``"1f1b"``, ``"1f1b_split"``, ``"1f1b_eager"`` and ``"zero_bubble"`` are fixed.
        checkpoint: ``"consolidated"`` writes the file that a single-device run would write,
            ``"sharded"`` a folder to which each rank writes its part; every layout reads both.
        async_checkpoint: Write checkpoints in the background, from a copy in host memory.
        full_precision_gradients: Add up the gradients of low-precision parameters (bf16-true) in
            float32 within a step; False does so in their own type, which saves memory and loses
            small contributions.
        compile: Compile MLPs, norms and projectors with torch.compile, for any number of rows.
            Not with schedules that split B into I and W.
        compile_backend: Backend of torch.compile.
        timeout_seconds: How long a message or collective may take before the job ends.
        stop_seconds: How long a rank may take to finish its step after SIGTERM or Ctrl-C,
            before it saves.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None takes the device's default.
        cluster_environment: Overrides Lightning's choice.
        checkpoint_io: Overrides Lightning's choice.
        precision_plugin: Overrides Lightning's choice.

    Raises:
        ConfigError: If the numbers do not fit the devices or the model; before any rank is started
            where that can be known.
    """

    strategy_name = "entrain"

    def __init__(
        self,
        encoder_stages: int | None = None,
        llm_stages: int | None = None,
        replicas: int = 1,
        *,
        placement: str = "one_per_rank",
        plan: str | Path | ParallelPlan | None = None,
        schedule: str = "auto",
        checkpoint: str = "consolidated",
        async_checkpoint: bool = False,
        full_precision_gradients: bool = True,
        compile: bool = False,
        compile_backend: str = "inductor",
        timeout_seconds: float = 600.0,
        stop_seconds: float = 60.0,
        process_group_backend: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            checkpoint=checkpoint,
            async_checkpoint=async_checkpoint,
            timeout_seconds=timeout_seconds,
            stop_seconds=stop_seconds,
            process_group_backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        wish = LayoutRequest(
            world_size=1,
            replicas=replicas,
            encoder_stages=encoder_stages,
            llm_stages=llm_stages,
            placement=placement,
        )
        given = None if plan is None else read_plan(plan)
        self._run_plan = RunPlan(wish, given, schedule, may_split=not compile)
        self._engine_options: dict[str, Any] = {
            "full_precision_gradients": full_precision_gradients,
            "compile_backend": compile_backend if compile else None,
        }
        self._groups_made_for: tuple[Any, ...] | None = None
        self._optimizer_layouts: list[OptimizerLayout] = []
        self._accumulating = False
        self._one_stage = False
        self._tied: TiedCopies | None = None
        self._finite = FiniteCheck()

    # --- who is where -----------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Data-parallel copies of the pipeline; read by :class:`EntrainDataModule`."""
        return self._run_plan.wish.replicas

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches per replica that a given plan asks for; read by the data module."""
        given = self._run_plan.given
        return None if given is None else given.num_microbatches

    @property
    def layout(self) -> StageLayout:
        """Stages, layers and ranks; final once the strategy is set up."""
        return self._run_plan.layout

    @property
    def plan(self) -> ParallelPlan | None:
        """The plan in force; None while the layout follows the parameters alone."""
        return self._run_plan.plan

    @property
    def workload(self) -> Workload | None:
        """What samples cost in this model on this device; None for models without a config."""
        return self._run_plan.workload

    @property
    def sample_costs(self) -> Costs | None:
        """Costs by which the data module assigns samples; None if unknown."""
        return None if self.workload is None else self.workload.sample_costs

    @property
    def step_planner(self) -> StepPlanner | None:
        """Plans this rank's steps ahead, in the data module; None without an EntrainModel."""
        if self._run_plan.partition is None:
            return None
        return self._run_plan.step_planner(
            self.global_rank, WIRE_DTYPES[str(self.precision_plugin.precision)]
        )

    @property
    def stage_shares(self) -> tuple[float, ...] | None:
        """Part of its module's work that each stage does; None if unknown."""
        planner: StepPlanner | None = self.step_planner
        return None if planner is None else planner.stage_shares

    @property
    def stage_factors(self) -> tuple[tuple[float, float, float], ...] | None:
        """Parts of each stage's work that F, I and W do; follows from what is trained."""
        planner: StepPlanner | None = self.step_planner
        return None if planner is None else planner.stage_factors

    @property
    def last_step_plan(self) -> StepPlan | None:
        """What this rank did in the last step; None before the first."""
        return None if self._engine is None else self._engine.last_plan

    @property
    def last_recorder(self) -> StepRecorder | None:
        """When this rank's actions of the last step ran; None before the first."""
        return None if self._engine is None else self._engine.last_recorder

    def gather_on_rank_zero(self, value: _Result) -> list[_Result] | None:
        """All ranks' values, by global rank, on rank 0; None on the others. All ranks call it."""
        if self._groups.control is None:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(value, found, group=self._groups.control)
        return found

    @property
    def data_needs(self) -> DataNeeds:
        """Which tensors of a global batch this rank reads; read by the data module."""
        if self._run_plan.partition is None:
            return DataNeeds.everything()
        return self._run_plan.partition.data_needs(self.global_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How an ordinary dataset is shared out: by replica."""
        replica = self.global_rank * self.num_replicas // max(self.world_size, 1)
        return {"num_replicas": self.num_replicas, "rank": replica}

    # --- set-up -----------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        world_size = self.num_processes * self.num_nodes
        self._run_plan.check_ranks(world_size)
        if world_size == 1:
            return
        self._check_precision()
        check_not_interactive(self.cluster_environment, world_size)
        self._launcher = EntrainLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            preflight=self._run_plan.check_model,
        )

    def connect(self, model: pl.LightningModule) -> None:
        """Attach the user's module; the layout is provisional until the data is known."""
        super().connect(model)
        self._one_stage = self._run_plan.runs_as_one_stage(model)
        if self._one_stage:
            self._run_plan.forget()
            return
        self._check_precision()
        self._run_plan.adopt(model, self.root_device, str(self.precision_plugin.precision))

    def setup(self, trainer: pl.Trainer) -> None:
        """Configure the optimizers on the full model, then keep this rank's stages only."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        if self._runs_as_one_stage():
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._adopt_again()
        self._fix_layout(trainer, announce=fitting)
        # Every rank logs the values of the whole global batch.
        warnings.filterwarnings("ignore", message=r".*sync_dist=True")
        partition = self._partition
        partition.restore_foreign_as_meta()
        if fitting:
            self.setup_optimizers(trainer)
        partition.prune(self.global_rank)
        if fitting:
            kept = set(self.lightning_module.parameters())
            for optimizer in self.optimizers:
                prune_optimizer(optimizer, kept)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self._connect_stages()
        if self._groups.replicas is not None:
            copy_from_first_replica(partition.own_tensors(), self._groups.replicas)
        self._tied = partition.tied_copies(self.global_rank, self._groups.ties)
        self._tied.equalize()
        self._attach_engine()
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _runs_as_one_stage(self) -> bool:
        """Whether there is one process and no model to cut; final after ``configure_model``."""
        if self._one_stage and self.lightning_module is not None:
            self._one_stage = self._run_plan.runs_as_one_stage(self.lightning_module)
        return self._one_stage

    @property
    def _partition(self) -> ModelPartition:
        assert self._run_plan.partition is not None
        return self._run_plan.partition

    def _adopt_again(self) -> None:
        """Agree on what is trained now, if the model ran before: ranks know of their parts only."""
        partition = self._run_plan.partition
        if partition is None or not partition.pruned:
            return
        partition.restore_foreign_as_meta()
        flags = self.broadcast(self.gather_on_rank_zero(partition.own_flags(self.global_rank)))
        assert flags is not None
        self._run_plan.adopt_again(flags, self.root_device, str(self.precision_plugin.precision))

    def _fix_layout(self, trainer: pl.Trainer, *, announce: bool) -> None:
        assert self.lightning_module is not None
        if self._run_plan.partition is None:  # the model was built in configure_model
            self.connect(self.lightning_module)
            find_model(self.lightning_module)
        datamodule = getattr(trainer, "datamodule", None)
        shape = getattr(datamodule, "shape", None)
        if datamodule is not None and shape is not None and hasattr(datamodule, "train_sizes"):
            self._run_plan.refine(
                datamodule.train_sizes(),
                global_batch_size=shape.global_batch_size,
                num_microbatches=shape.microbatches(shape.global_batch_size, self.num_replicas),
                ranks_per_node=self.num_processes,
                from_rank_zero=lambda make: self.broadcast(make() if self.is_global_zero else None),
            )
        if announce and self.is_global_zero:
            self._run_plan.announce(trainer.loggers, getattr(shape, "global_batch_size", None))

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Run the user's ``configure_optimizers`` and note where each parameter is."""
        assert self.lightning_module is not None
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if self._one_stage:
            return
        names = self._parameter_names()
        self._optimizer_layouts = [record_layout(optimizer, names) for optimizer in self.optimizers]

    def model_to_device(self) -> None:
        """Move what is left of the module to the rank's device."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def _connect_stages(self) -> None:
        """Make the process groups, again only where stages or ties have changed.

        All ranks decide alike, for torch counts new groups on every rank.
        """
        ties = self._partition.ties
        pairs = tuple(sorted({tie.ranks for tie in ties}))
        wanted = (self.layout.placement.stage_to_rank, self.layout.num_replicas, pairs)
        if self.is_distributed and wanted != self._groups_made_for:
            self._groups = create_groups(self.layout, self.root_device, self._timeout)
            self._groups.ties = create_tie_groups(self.layout, ties, self._timeout)
            self._groups_made_for = wanted

    def _attach_engine(self) -> None:
        planner = self.step_planner
        assert planner is not None
        assert self.lightning_module is not None
        self._engine = PipelineEngine(
            self._partition.model,
            self.layout,
            global_rank=self.global_rank,
            groups=self._groups,
            device=self.root_device,
            planner=planner,
            stop_request=self._stop_request,
            tied=self._tied,
            activity=self._activity,
            **self._engine_options,
            sum_at_backward=not self.lightning_module.automatic_optimization,
        )
        self._partition.model.attach_engine(self._engine)

    # --- a step -----------------------------------------------------------------------------

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Check what was loaded against the plan, then move the batch."""
        if isinstance(batch, PlannedBatch):
            partition = self._run_plan.partition
            llm = None if partition is None else partition.model.llm
            check_rows(batch, getattr(llm, "image_token_id", None))
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Free the last step's gradients before the schedule needs the memory."""
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        if module is None or self._one_stage or not module.automatic_optimization:
            return
        if batch_idx % module.trainer.accumulate_grad_batches == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``; a loss that is no number is told once."""
        output = super().training_step(*args, **kwargs)
        if self.is_global_zero and self._engine is not None and self._engine.last_loss is not None:
            assert self.lightning_module is not None
            step = self.lightning_module.trainer.global_step + 1
            self._finite.note(step, self._engine.last_loss)
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand the gradients over, then sum them over replicas unless still accumulating."""
        self.pre_backward(closure_loss)
        assert self.lightning_module is not None
        module = self.lightning_module
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        later_or_done = self._accumulating or not module.automatic_optimization
        if self._groups.replicas is not None and not later_or_done:
            trainable = [p for p in module.parameters() if p.requires_grad]
            with self._activity.during("the sum of gradients over replicas", waits=True):
                sum_over_replicas(trainable, self._groups.replicas)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, gradients stay on their replica; used while accumulating."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank loads its own stages, which it knows after set-up."""
        return not self._runs_as_one_stage()

    # --- the end ----------------------------------------------------------------------------

    def teardown(self) -> None:
        """Detach the engine; the ranks stay connected for a further fit or validate."""
        if not self._failed:
            self._finite.flush()
        self._finite.reset()
        if self._run_plan.partition is not None:
            self._partition.model.detach_engine()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        super().teardown()
