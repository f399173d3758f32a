"""Search over topologies under the memory limit (Entrain, section 4.3, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_entrain.errors import ConfigError, InfeasiblePlanError
from lightning_entrain.plan.request import CostBook, PlanRequest, Topology, check_request
from lightning_entrain.plan.score import Candidate, assess, memory_excess, to_plan
from lightning_entrain.plan.types import ParallelPlan, Supported

Evaluate = Callable[[ParallelPlan], float]
"""Predicted milliseconds of one step under a plan, e.g. by simulation."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Plans by predicted time, best first.

    Attributes:
        plans: The best plans; the first is the choice.
        num_candidates: Topologies scored.
        num_too_large: Of those looked at, how many did not fit into memory.
    """

    plans: tuple[ParallelPlan, ...]
    num_candidates: int
    num_too_large: int

    @property
    def best(self) -> ParallelPlan:
        """The chosen plan."""
        return self.plans[0]


def search_plans(
    request: PlanRequest,
    *,
    supported: Supported | None = None,
    runnable_only: bool = False,
    evaluate: Evaluate | None = None,
    num_best: int = 6,
) -> SearchResult:
    """Find the topology with the most throughput that fits into memory.

    Candidates are ordered by the paper's formula, the sum of all stages' times plus (K-1) times the
    slowest stage, plus the transfers between stages and the gradient reduction over replicas.
    Memory is checked in that order until ``num_best`` fit.

    Args:
        request: What to plan for.
        supported: What the runtime can do; the rest is marked in ``not_runnable``.
        runnable_only: Leave out what is marked.
        evaluate: Predicts the step time of the ``num_best`` plans more exactly; they are ordered
            by it.
        num_best: Plans to return.

    Raises:
        ConfigError: If an argument is out of range.
        InfeasiblePlanError: If no topology exists or none fits; it names the stage that comes
            nearest, what it lacks and what would help.
    """
    check_request(request)
    book = CostBook(request)
    allowed = supported if runnable_only else None
    if allowed is not None:
        _check_given(request, allowed)
    candidates = [assess(request, book, item) for item in enumerate_topologies(request, allowed)]
    if not candidates:
        raise _no_topology(request)
    candidates.sort(key=lambda item: (item.iteration_ms / item.num_samples, item.key))
    chosen: list[ParallelPlan] = []
    nearest: tuple[float, Candidate] | None = None
    num_too_large = 0
    for candidate in candidates:
        excess = memory_excess(request, book, candidate)
        if excess > 0:
            num_too_large += 1
            if nearest is None or excess < nearest[0]:
                nearest = (excess, candidate)
            continue
        plan = to_plan(request, book, candidate)
        if supported is not None:
            plan = replace(plan, not_runnable=supported.problems(plan))
        chosen.append(plan)
        if len(chosen) == num_best:
            break
    if not chosen:
        assert nearest is not None
        raise _too_large(request, book, *nearest)
    if evaluate is not None:
        chosen = [replace(plan, evaluated_ms=float(evaluate(plan))) for plan in chosen]
        chosen.sort(key=lambda plan: plan.evaluated_ms or 0.0)
    return SearchResult(
        plans=tuple(chosen), num_candidates=len(candidates), num_too_large=num_too_large
    )


def _check_given(request: PlanRequest, allowed: Supported) -> None:
    """Refuse given sizes that contradict the wish for a runnable plan."""
    for name in ("encoder_tp", "llm_tp"):
        given = getattr(request, name)
        if given is not None and given not in allowed.tp:
            raise ConfigError(
                f"{name} is {given} with runnable_only=true",
                limit=f"the runtime can do {', '.join(map(str, allowed.tp))}",
                remedy=f"set {name}=null; a cluster's config may have set it",
            )


def tp_sizes(request: PlanRequest, name: str, supported: Supported | None) -> tuple[int, ...]:
    """Tensor-parallel sizes worth trying for a module: divisors of a node and of the heads."""
    module = request.model.encoder if name == "encoder" else request.model.llm
    given = getattr(request, f"{name}_tp")
    attention = module.blocks[0].attention
    assert attention is not None
    sizes = []
    for tp in range(1, request.cluster.gpus_per_node + 1):
        fits = request.cluster.gpus_per_node % tp == 0
        fits = fits and attention.num_heads % tp == 0 and attention.num_kv_heads % tp == 0
        fits = fits and (request.cost_model.tp_sizes is None or tp in request.cost_model.tp_sizes)
        if fits and (supported is None or tp in supported.tp):
            sizes.append(tp)
    return (given,) if given is not None else tuple(sizes)


def enumerate_topologies(request: PlanRequest, supported: Supported | None) -> Iterator[Topology]:
    """All topologies of a request, neighbours of the proportional split among them."""
    gpus, batch = request.cluster.num_gpus, request.global_batch_size
    for dp in range(1, gpus // 2 + 1):
        if gpus % dp or batch % dp or request.dp not in (None, dp):
            continue
        per_replica = gpus // dp
        sizes = [m for m in request.microbatch_sizes if (batch // dp) % m == 0]
        for encoder_tp in tp_sizes(request, "encoder", supported):
            for llm_tp in tp_sizes(request, "llm", supported):
                if supported and not supported.unequal_tp and encoder_tp != llm_tp:
                    continue
                for encoder, llm in _stage_counts(request, per_replica, encoder_tp, llm_tp):
                    for size in sizes:
                        yield Topology(
                            dp=dp,
                            encoder_tp=encoder_tp,
                            llm_tp=llm_tp,
                            encoder_stages=encoder,
                            llm_stages=llm,
                            microbatch_size=size,
                        )


def _stage_counts(
    request: PlanRequest, gpus: int, encoder_tp: int, llm_tp: int
) -> Iterator[tuple[int, int]]:
    for encoder in range(1, request.model.encoder.num_layers + 1):
        rest = gpus - encoder * encoder_tp
        if rest < llm_tp:
            return
        llm, odd = divmod(rest, llm_tp)
        if odd or llm > request.model.llm.num_layers:
            continue
        if request.encoder_stages in (None, encoder) and request.llm_stages in (None, llm):
            yield encoder, llm


def _no_topology(request: PlanRequest) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"No topology of {request.cluster.num_gpus} GPUs fits dp={request.dp}, "
        f"encoder_tp={request.encoder_tp}, llm_tp={request.llm_tp}, "
        f"encoder_stages={request.encoder_stages}, llm_stages={request.llm_stages}, "
        f"global_batch_size={request.global_batch_size}",
        limit="GPUs = dp x (encoder_tp x encoder_stages + llm_tp x llm_stages), dp x "
        "microbatch_size divides the batch, no more stages than layers "
        f"({request.model.encoder.num_layers} and {request.model.llm.num_layers})",
        remedy="leave some of them open, or change the number of GPUs",
    )


def _too_large(
    request: PlanRequest, book: CostBook, excess: float, candidate: Candidate
) -> InfeasiblePlanError:
    plan = to_plan(request, book, candidate)
    stage = max(plan.stages, key=lambda item: item.memory_gib)
    parts = {
        "weights, gradients and optimizer states": stage.state_gib,
        "activations": stage.activation_gib,
        "buffers": stage.buffer_gib,
    }
    main = max(parts, key=lambda name: parts[name])
    remedies = {
        "weights, gradients and optimizer states": "more GPUs per replica, tensor parallelism, "
        "bf16-true, LoRA or freezing a module",
        "activations": "training.recompute=true, smaller microbatches or tensor parallelism",
        "buffers": "smaller microbatches or tensor parallelism",
    }
    usable = request.cluster.usable_bytes / 2**30
    return InfeasiblePlanError(
        f"No topology fits into memory; nearest is dp={plan.dp}, encoder_stages="
        f"{plan.encoder_stages}, llm_stages={plan.llm_stages}, encoder_tp={plan.encoder_tp}, "
        f"llm_tp={plan.llm_tp}, where {stage.module} layers {stage.start}-{stage.stop - 1} need "
        f"{stage.memory_gib:.1f} GiB ({main} {parts[main]:.1f} GiB), {excess / 2**30:.1f} GiB too "
        "much",
        limit=f"{usable:.1f} GiB usable on a {request.cluster.device.name}",
        remedy=remedies[main],
    )
