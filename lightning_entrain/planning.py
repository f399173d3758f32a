"""From a real model and dataset to costs and a plan: where the pure core meets the run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lightning_entrain.errors import ConfigError
from lightning_entrain.model_shapes import shape_of_model, trained_parts
from lightning_entrain.models.freezing import modules_of
from lightning_entrain.models.recompute import recomputed_share
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.plan.placed import placed_plan
from lightning_entrain.plan.planner import WorkloadProfile, make_plan, profile_workload
from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.stages import module_costs
from lightning_entrain.plan.types import ParallelPlan, Supported
from lightning_entrain.workload.costs import CostModel, sample_costs
from lightning_entrain.workload.hardware import DEVICES, Cluster, Device, cpu_device
from lightning_entrain.workload.memory import Training, TrainMode
from lightning_entrain.workload.roofline import AnalyticCostModel
from lightning_entrain.workload.shapes import ModelShape
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable
from lightning_entrain.workload.trained_flops import TrainedParts, TrainingFlops

if TYPE_CHECKING:
    from lightning_entrain.models.entrain_model import EntrainModel

SUPPORTED = Supported(tp=(1,), cp=(1,), unequal_tp=False)
"""What the runtime can carry out of a plan."""

_MAX_PLANNED_SAMPLES = 4096
_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")

# Nominal, not measured: every rank must come to the same costs, and only their ratios matter.
_NOMINAL_CPU = cpu_device(peak_tflops=0.1, bandwidth_gbps=20.0, memory_gib=1024.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What samples cost in a given model on a given device.

    Attributes:
        shape: The model's layers.
        cost_model: Analytic or measured.
        training: What is trained, and in which precision.
        device: The device, as a roofline.
        trained: Which part of each layer is trained; None for all.
    """

    shape: ModelShape
    cost_model: CostModel
    training: Training
    device: Device
    trained: TrainedParts | None = None

    def sample_costs(self, sizes: Sequence[SampleSize]) -> tuple[list[float], list[float]]:
        """Predicted milliseconds (forward and backward) per sample in encoder and LLM."""
        return self.costs_of(self.table(sizes))

    def costs_of(self, table: SizeTable) -> tuple[list[float], list[float]]:
        """As :meth:`sample_costs`, of samples that are a table already."""
        costs = sample_costs(self.shape, table, self.cost_model, self.training)
        return costs.encoder_ms.tolist(), costs.llm_ms.tolist()

    def training_flops(self, sizes: Sequence[SampleSize]) -> float:
        """Model FLOPs of training these samples: forward, and the backward that is needed.

        Recomputation is not counted; see `workload.trained_flops`.
        """
        return self.step_flops(self.table(sizes))

    @cached_property
    def step_flops(self) -> TrainingFlops:
        """Model FLOPs of training the samples of a table."""
        return TrainingFlops(self.shape, self.trained or TrainedParts.whole(self.shape))

    def table(self, sizes: Sequence[SampleSize]) -> SizeTable:
        """The samples' sizes as arrays."""
        return SizeTable.from_sizes(sizes, window=self.shape.encoder.window or 8)

    def layer_ms(
        self, sizes: Sequence[SampleSize], microbatch_size: float = 4.0
    ) -> tuple[list[float], list[float]]:
        """Milliseconds per layer for a mean microbatch.

        Prologue and epilogue count as part of the first and the last layer.
        """
        table = self.table(sizes)
        found = []
        for module in self.shape.modules:
            costs = module_costs(
                module,
                table,
                self.cost_model,
                self.training,
                tp=1,
                microbatch_size=microbatch_size,
            )
            found.append((costs.forward_ms + costs.backward_ms).tolist())
        return found[0], found[1]

    def profile(self, sizes: Sequence[SampleSize], num_gpus: int) -> WorkloadProfile:
        """b_min, shares and splits of these samples on ``num_gpus`` (paper, section 4.2)."""
        return profile_workload(
            self.shape, self.table(sizes), self.cost_model, num_gpus, training=self.training
        )

    def plan(
        self,
        sizes: Sequence[SampleSize],
        *,
        num_ranks: int,
        ranks_per_node: int,
        replicas: int,
        global_batch_size: int,
        num_microbatches: int,
        encoder_stages: int | None,
        llm_stages: int | None,
        placement: str = "one_per_rank",
    ) -> ParallelPlan:
        """The best plan the runtime can carry out.

        Args:
            sizes: The training samples, or enough of them.
            num_ranks: Devices of the job.
            ranks_per_node: Devices of one node.
            replicas: Data-parallel copies.
            global_batch_size: Samples per optimizer step.
            num_microbatches: Microbatches per replica.
            encoder_stages: Given by the user, or None.
            llm_stages: Given by the user, or None.
            placement: A name in :data:`plan.placements.PLACEMENTS`; others than ``one_per_rank``
                decide the stages.

        Raises:
            InfeasiblePlanError: If nothing fits the devices' memory.
        """
        step = max(1, len(sizes) // _MAX_PLANNED_SAMPLES)
        if placement != "one_per_rank":
            return placed_plan(
                placement,
                model=self.shape,
                table=self.table(sizes[::step]),
                cost_model=self.cost_model,
                training=self.training,
                num_ranks=num_ranks // replicas,
                dp=replicas,
                global_batch_size=global_batch_size,
                num_microbatches=num_microbatches,
            )
        request = PlanRequest(
            model=self.shape,
            table=self.table(sizes[::step]),
            cluster=Cluster(
                device=self.device,
                num_gpus=num_ranks,
                gpus_per_node=ranks_per_node,
                link_gbps=self.device.link_gbps,
                network_gbps=min(self.device.link_gbps, 25.0),
            ),
            cost_model=self.cost_model,
            training=self.training,
            global_batch_size=global_batch_size,
            dp=replicas,
            encoder_tp=1,
            llm_tp=1,
            encoder_stages=encoder_stages,
            llm_stages=llm_stages,
            microbatch_sizes=(max(1, global_batch_size // (replicas * num_microbatches)),),
        )
        report = make_plan(request, supported=SUPPORTED, runnable_only=True)
        return replace(report.plan, num_microbatches=num_microbatches)


def workload_of(
    model: EntrainModel, device: torch.device, *, precision: str = "32-true"
) -> Workload | None:
    """Costs of a model built from Hugging Face configurations; None for other models.

    Args:
        model: The whole model.
        device: Where it runs. CUDA devices are looked up by name, others by nominal numbers.
        precision: Lightning's name.
    """
    try:
        shape = shape_of_model(model)
    except ConfigError:
        return None
    found = device_of(device)
    again = recomputed_share(model.encoder), recomputed_share(model.llm)
    training = Training(
        encoder=_mode(modules_of(model, "encoder")),
        projector=_mode(modules_of(model, "projector")),
        llm=_mode(modules_of(model, "llm")),
        precision=cast(Any, precision if precision in _PRECISIONS else "32-true"),
        recompute=min(again) > 0.5,
        recomputed=again,
    )
    cost_model = AnalyticCostModel(device=found, link_gbps=found.link_gbps)
    return Workload(
        shape=shape,
        cost_model=cost_model,
        training=training,
        device=found,
        trained=trained_parts(model, shape),
    )


def device_of(device: torch.device) -> Device:
    """The roofline of a device, with the memory it really has.

    A GPU that is not known takes the speeds of an H100: of those only ratios matter here.
    """
    if device.type != "cuda":
        return _NOMINAL_CPU
    found = torch.cuda.get_device_properties(device)
    return replace(named_device(found.name), memory_gib=found.total_memory / 2**30)


def named_device(name: str) -> Device:
    """The device whose name occurs as a word (or two, as in "RTX 4090") in a GPU's name."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    joined = {*words, *("".join(pair) for pair in pairwise(words))}
    for known, device in DEVICES.items():
        if known.split("-")[0] in joined:
            return device
    return DEVICES["h100"]


def stage_shares(
    workload: Workload, layout: StageLayout, sizes: Sequence[SampleSize]
) -> tuple[float, ...]:
    """Part of its module's work that each stage does, encoder stages first."""
    step = max(1, len(sizes) // _MAX_PLANNED_SAMPLES)
    shares = []
    for costs, ranges in zip(
        workload.layer_ms(sizes[::step]), (layout.encoder_ranges, layout.llm_ranges), strict=True
    ):
        total = sum(costs) or 1.0
        shares += [sum(costs[start:stop]) / total for start, stop in ranges]
    return tuple(shares)


def check_runnable(plan: ParallelPlan, num_ranks: int) -> None:
    """Refuse what the runtime cannot carry out, and plans for another number of devices.

    Raises:
        ConfigError: Naming the field, or both numbers.
    """
    SUPPORTED.require(plan)
    plan.check_devices(num_ranks)


def layout_of(
    plan: ParallelPlan, *, num_ranks: int, encoder_layers: int, llm_layers: int
) -> StageLayout:
    """The layout a plan asks for.

    Raises:
        ConfigError: If the runtime cannot carry it out, or it is for other devices or another
            model; names the field.
    """
    check_runnable(plan, num_ranks)
    plan.check_layers(encoder_layers=encoder_layers, llm_layers=llm_layers)
    return StageLayout(
        num_replicas=plan.dp,
        encoder_ranges=tuple(plan.encoder_layers),
        llm_ranges=tuple(plan.llm_layers),
        placement=plan.placement,
    )


def _mode(modules: Iterable[nn.Module]) -> TrainMode:
    """How modules are trained; with small parts of them alone (adapters), as with LoRA."""
    parameters = [p for module in modules for p in module.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    if not trained:
        return "frozen"
    return "full" if 2 * trained >= sum(p.numel() for p in parameters) else "lora"
