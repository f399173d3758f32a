"""The engine that takes the place of the model's own forward inside a pipeline job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.accumulate import GradientAccumulator
from lightning_entrain.runtime.activity import Activity
from lightning_entrain.runtime.compiled import CompiledLayers
from lightning_entrain.runtime.executor import Executor
from lightning_entrain.runtime.gradients import scale_gradients, sum_over_replicas
from lightning_entrain.runtime.groups import PipelineGroups
from lightning_entrain.runtime.recorder import StepRecorder
from lightning_entrain.runtime.signals import StopRequest
from lightning_entrain.runtime.state import StepSums
from lightning_entrain.runtime.step_plan import StepPlan, StepPlanner
from lightning_entrain.runtime.ties import TiedCopies
from lightning_entrain.runtime.trained import TrainedCheck
from lightning_entrain.runtime.transfer import DTYPES, Transfers
from lightning_entrain.runtime.weight_store import WeightStore


class PipelineEngine:
    """Runs a planned global batch through the pipeline and returns the loss.

    It is called exactly as the model is, ``loss = engine(batch)``, and returns the same scalar on
    every rank. Under autograd the gradients are computed while it runs and handed over when
    ``backward`` reaches the loss, so that zero_grad, accumulation and any arithmetic on the loss
    keep their meaning.

    Args:
        model: The model with this rank's layers.
        layout: Stages and replicas.
        global_rank: This rank.
        groups: Its process groups.
        device: Its device.
        planner: Plans steps that come without a plan.
        full_precision_gradients: Add up the gradients of low-precision parameters in float32.
        stop_request: A wish to end the job, shared with all ranks at every step.
        sum_at_backward: Sum gradients over replicas in every backward; otherwise whoever calls
            the engine does so, once per optimizer step.
        tied: Copies of parameters that are tied to another rank's.
        compile_backend: Of torch.compile for this rank's layers; None leaves them as they are.
        activity: Told what this rank does.

    Attributes:
        stop_agreed: What all ranks know of such wishes since the last step; 0 for none.
        last_plan: The plan of the last step.
        last_recorder: When its actions ran on this rank.
        last_loss: Mean loss of the last step, on the device.
        last_sync_ms: How long this rank waited for the others before and after its actions.
    """

    def __init__(
        self,
        model: EntrainModel,
        layout: StageLayout,
        *,
        global_rank: int,
        groups: PipelineGroups,
        device: torch.device,
        planner: StepPlanner,
        full_precision_gradients: bool = True,
        stop_request: StopRequest | None = None,
        sum_at_backward: bool = False,
        tied: TiedCopies | None = None,
        compile_backend: str | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._replica, self._rank = layout.split(global_rank)
        self._groups = groups
        self._device = device
        self._planner = planner
        transfers = Transfers(groups, device, base=self._replica * layout.num_ranks)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._accumulator = GradientAccumulator(
            self._parameters, full_precision=full_precision_gradients
        )
        self._compiled = CompiledLayers(model, compile_backend) if compile_backend else None
        # Compiled layers cannot leave weight gradients for later: W finds nothing to do then.
        layers = model.modules() if self._compiled is None else ()
        self._weight_store = WeightStore(layers, self._accumulator)
        self._executor = Executor(
            model,
            layout,
            self._rank,
            transfers,
            wire_dtype=DTYPES[planner.dtype],
            accumulator=self._accumulator,
            weight_store=self._weight_store,
        )
        self._stop_request = stop_request
        self._tied = tied
        self._activity = activity if activity is not None else Activity()
        self._check_trained = TrainedCheck(model.parameters())
        self._sum_group = groups.replicas if sum_at_backward else None
        self.stop_agreed = 0
        self.last_plan: StepPlan | None = None
        self.last_recorder: StepRecorder | None = None
        self.last_loss: Tensor | None = None
        self.last_sync_ms = 0.0

    def __call__(self, batch: PlannedBatch) -> Tensor:
        """Run one global batch.

        Args:
            batch: The planned batch; every rank passes the same plan.

        Returns:
            Scalar float32: loss sum over all label tokens / their number, equal on all ranks.

        Raises:
            ConfigError: If the batch is not a planned one, or planned for another layout.
            RuntimeMismatchError: If ranks disagree on the plan.
            ScheduleError: If the schedule fails verification.
        """
        train = torch.is_grad_enabled()
        self._check_batch(batch)
        self._check_trained()
        plan = self._plan_of(batch, train=train)
        self._compare_plans(plan)
        if not train:
            return self._reduce(self._run(plan, batch), batch)
        kept = [p.grad for p in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = None
            with self._accumulator.collecting():
                sums = self._run(plan, batch)
            fresh = self._accumulator.take()
            if self._tied is not None:
                self._activity.enter("the sum of tied gradients", waits=True)
                self._tied.sum_gradients(self._parameters, fresh)
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        loss = self._reduce(sums, batch)
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        store = _GradientStore(self._parameters, fresh, self._sum_group)
        return _ReplayGradients.apply(anchor, loss, store)

    def close(self) -> None:
        """Give the model back as it was."""
        self._weight_store.remove()
        if self._compiled is not None:
            self._compiled.remove()
        self._accumulator.remove()

    def _plan_of(self, batch: PlannedBatch, *, train: bool) -> StepPlan:
        """The plan that came with the batch, or a new one."""
        ready = batch.step_plan
        if isinstance(ready, StepPlan) and ready.train is train:
            return ready
        return self._planner(batch.assignment, batch.sizes, train=train)

    def _run(self, plan: StepPlan, batch: PlannedBatch) -> StepSums:
        self.last_plan = plan
        self.last_recorder = StepRecorder(self._rank, self._device, self._activity)
        sums = self._executor.run(
            plan.program,
            plan.rows,
            batch,
            self._replica,
            train=plan.train,
            device=self._device,
            recorder=self.last_recorder,
        )
        self.last_sync_ms += self.last_recorder.drain_ms
        return sums

    def _check_batch(self, batch: Any) -> None:
        if not isinstance(batch, PlannedBatch):
            raise ConfigError(
                f"The model was called with a {type(batch).__name__}",
                limit="the pipeline runs planned batches",
                remedy="pass the batch of an EntrainDataModule unchanged: self.model(batch)",
            )
        planned = len(batch.assignment.replicas)
        if planned != self._layout.num_replicas:
            raise ConfigError(
                f"The batch is assigned to {planned} replica(s)",
                limit=f"the strategy runs {self._layout.num_replicas}",
                remedy="let EntrainDataModule take the number from the strategy",
            )

    def _compare_plans(self, plan: StepPlan) -> None:
        """Raise on every rank if one has another plan, before any tensor is sent."""
        self.last_sync_ms = 0.0
        stop = self._stop_request.kind if self._stop_request is not None else 0
        if self._groups.control is None:
            self.stop_agreed = stop
            return
        own = torch.tensor([self._replica, plan.batch_digest, plan.program_digest, stop])
        found = [torch.empty_like(own) for _ in range(self._layout.world_size)]
        begin = time.perf_counter()
        with self._activity.during("the comparison of plans", waits=True):
            dist.all_gather(found, own, group=self._groups.control)
        self.last_sync_ms += (time.perf_counter() - begin) * 1e3
        rows = [row.tolist() for row in found]
        self.stop_agreed = max(row[3] for row in rows)
        for rank, (replica, assignment, schedule, _) in enumerate(rows):
            first = self._layout.num_ranks * replica
            _require_equal(rank, 0, "assignment of the global batch", assignment, rows[0][1])
            _require_equal(rank, first, "schedule of the replica", schedule, rows[first][2])

    def _reduce(self, sums: StepSums, batch: PlannedBatch) -> Tensor:
        packed = torch.stack([sums.loss, *sums.scalars.values()])
        if self._groups.control is not None:
            begin = time.perf_counter()
            with self._activity.during("the sum of the loss", waits=True):
                dist.all_reduce(packed)
            self._activity.enter("training_step, after the model")
            self.last_sync_ms += (time.perf_counter() - begin) * 1e3
        values = packed.unbind()
        self._model.scalars_out = dict(zip(sums.scalars, values[1:], strict=True))
        self.last_loss = (values[0] / max(batch.num_label_tokens, 1)).float()
        return self.last_loss


def _require_equal(rank: int, reference: int, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeMismatchError(
            f"Rank {rank} has another {what} ({found:x}) than rank {reference} ({expected:x})",
            limit="all ranks plan the same step",
            remedy="use the same data, configuration and package versions on every rank",
        )


class _GradientStore:
    """Gradients of one step, waiting for backward; summed over the ranks of a group there."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        sum_group: dist.ProcessGroup | None,
    ) -> None:
        self._parameters = parameters
        self._gradients: Sequence[Tensor | None] | None = gradients
        self._sum_group = sum_group

    def release(self, scale: Tensor) -> None:
        """Add ``scale`` times the stored gradients to ``p.grad``, once."""
        if self._gradients is None:
            raise RuntimeError(
                "backward() reached the pipeline's loss twice; run the model again for a second one"
            )
        fresh, self._gradients = self._gradients, None
        earlier = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, fresh, strict=True):
            parameter.grad = gradient
        scale_gradients([gradient for gradient in fresh if gradient is not None], scale)
        if self._sum_group is not None:
            sum_over_replicas(self._parameters, self._sum_group)
        for parameter, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


class _ReplayGradients(torch.autograd.Function):
    """Identity on the loss whose backward hands over gradients that are already computed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, store: _GradientStore) -> Tensor:
        ctx.store = store
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.store.release(gradients[0])
        return None, None, None
