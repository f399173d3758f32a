"""What a plan is asked for, and the costs that scoring needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.plan.stages import ModuleCosts, module_costs
from lightning_entrain.workload.costs import CostModel, check_parallelism
from lightning_entrain.workload.hardware import Cluster
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import ModelShape
from lightning_entrain.workload.tables import SizeTable


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for, and what of the plan is given.

    Attributes:
        model: Shape of the model.
        table: Sizes of the dataset's samples, or of a sample of them.
        cluster: The machine.
        cost_model: Analytic or measured.
        training: What is trained, precision, optimizer.
        global_batch_size: Samples per optimizer step.
        dp: Replicas; None to search.
        encoder_tp: Tensor parallelism of the encoder; None to search.
        llm_tp: Tensor parallelism of the LLM; None to search.
        encoder_stages: Encoder stages; None to search.
        llm_stages: LLM stages; None to search.
        microbatch_sizes: Samples per microbatch to try; K follows.
        deferral: Whether encoder outputs may wait for one more microbatch.
        extra_warmup: Forwards per stage beyond 1F1B's (eager forward).
    """

    model: ModelShape
    table: SizeTable
    cluster: Cluster
    cost_model: CostModel
    training: Training = field(default_factory=Training)
    global_batch_size: int
    dp: int | None = None
    encoder_tp: int | None = None
    llm_tp: int | None = None
    encoder_stages: int | None = None
    llm_stages: int | None = None
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    deferral: bool = True
    extra_warmup: int = 0


class CostBook:
    """Module costs by (module, TP, microbatch size), computed once each."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._known: dict[tuple[str, int, float], ModuleCosts] = {}

    def costs(self, name: str, tp: int, microbatch_size: float) -> ModuleCosts:
        """Costs of ``encoder`` or ``llm``."""
        key = (name, tp, microbatch_size)
        if key not in self._known:
            request = self._request
            module = request.model.encoder if name == "encoder" else request.model.llm
            self._known[key] = module_costs(
                module,
                request.table,
                request.cost_model,
                request.training,
                tp=tp,
                microbatch_size=microbatch_size,
            )
        return self._known[key]


@dataclass(frozen=True, kw_only=True, order=True)
class Topology:
    """One point of the search space."""

    dp: int
    encoder_tp: int
    llm_tp: int
    encoder_stages: int
    llm_stages: int
    microbatch_size: int


def check_request(request: PlanRequest) -> None:
    """Refuse requests that no search can serve.

    Raises:
        ConfigError: If a number is out of range or a given TP size does not divide the heads.
        InfeasiblePlanError: If there are fewer GPUs than modules.
    """
    gpus, batch = request.cluster.num_gpus, request.global_batch_size
    if batch < 1:
        raise ConfigError(f"global_batch_size is {batch}", limit="at least 1")
    if len(request.table) == 0:
        raise ConfigError("The table of sizes is empty", limit="at least one sample")
    if gpus < 2:
        raise InfeasiblePlanError(
            f"{gpus} GPU for 2 modules",
            limit="each module holds at least one GPU",
            remedy="one GPU needs no plan; to plan a pipeline, use more",
        )
    for name in ("dp", "encoder_tp", "llm_tp", "encoder_stages", "llm_stages"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", limit="at least 1")
    if request.dp is not None and (gpus % request.dp or gpus // request.dp < 2):
        raise InfeasiblePlanError(
            f"{gpus} GPUs for dp {request.dp}",
            limit="dp divides the GPUs and leaves at least 2 per replica",
        )
    if request.dp is not None and batch % request.dp:
        raise ConfigError(f"global_batch_size is {batch} with dp {request.dp}", limit="a multiple")
    for module, tp in (
        (request.model.encoder, request.encoder_tp),
        (request.model.llm, request.llm_tp),
    ):
        if tp is not None:
            check_parallelism(module.blocks[0], tp=tp, cp=1)
            if tp > request.cluster.gpus_per_node:
                raise ConfigError(
                    f"{module.name}_tp is {tp}",
                    limit=f"at most the {request.cluster.gpus_per_node} GPUs of a node",
                )
