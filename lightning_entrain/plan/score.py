"""Time and memory of one topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.plan.request import CostBook, PlanRequest, Topology
from lightning_entrain.plan.stages import ModuleCosts, StageTotals, stage_predictions
from lightning_entrain.plan.types import ParallelPlan, StagePrediction

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A topology with its predicted time.

    Attributes:
        topology: What was scored.
        num_microbatches: K.
        num_samples: Samples per step, over all replicas.
        fill_ms: Sum over all stages of one microbatch's time, transfers included.
        bottleneck_ms: Slowest stage's time per microbatch.
        bottleneck: Its index, encoder stages first.
        reduce_ms: Reduction of gradients over replicas.
        iteration_ms: The whole step.
    """

    topology: Topology
    num_microbatches: int
    num_samples: int
    fill_ms: float
    bottleneck_ms: float
    bottleneck: int
    reduce_ms: float
    iteration_ms: float

    @property
    def key(self) -> tuple[int, ...]:
        """Breaks ties: fewer replicas, less tensor parallelism, fewer stages first."""
        item = self.topology
        return (
            item.dp,
            item.encoder_tp + item.llm_tp,
            item.encoder_stages,
            item.llm_stages,
            item.microbatch_size,
        )


def assess(request: PlanRequest, book: CostBook, topology: Topology) -> Candidate:
    """Predicted step time: ``sum of stage times + (K-1) * slowest`` (Entrain, section 4.3).

    Added to it: one transfer per boundary each way, the redistribution between unequal tensor
    parallelism (on the last encoder stage, every microbatch), and the gradient reduction.
    """
    encoder, llm = _modules(book, topology)
    first, second = encoder.stages(topology.encoder_stages), llm.stages(topology.llm_stages)
    times = np.concatenate([first.time_ms, second.time_ms])
    if topology.encoder_tp != topology.llm_tp:
        times[topology.encoder_stages - 1] += _feature_bytes(request, encoder) / (
            request.cluster.link_gbps * 1e6
        )
    num_microbatches = request.global_batch_size // (topology.dp * topology.microbatch_size)
    bottleneck = int(times.argmax())
    fill = float(times.sum()) + _transfer_ms(request, topology, encoder, llm)
    reduce = _reduce_ms(request, topology, first, second)
    return Candidate(
        topology=topology,
        num_microbatches=num_microbatches,
        num_samples=request.global_batch_size,
        fill_ms=fill,
        bottleneck_ms=float(times[bottleneck]),
        bottleneck=bottleneck,
        reduce_ms=reduce,
        iteration_ms=fill + (num_microbatches - 1) * float(times[bottleneck]) + reduce,
    )


def stage_memory(
    request: PlanRequest, book: CostBook, candidate: Candidate
) -> tuple[FloatArray, FloatArray, FloatArray, NDArray[np.int64]]:
    """Bytes per stage: state, activations in flight, buffers; and the microbatches in flight.

    A stage keeps ``stages behind it + 1`` microbatches, at most K; encoder stages one more under
    deferral, whose backward waits for the next LLM microbatch. One of them is taken to hold the
    largest sample.
    """
    topology = candidate.topology
    encoder, llm = _modules(book, topology)
    first, second = encoder.stages(topology.encoder_stages), llm.stages(topology.llm_stages)
    total = topology.encoder_stages + topology.llm_stages
    flight = total - np.arange(total) + request.extra_warmup
    if request.deferral:
        flight[: topology.encoder_stages] += 1
    flight = np.minimum(flight, candidate.num_microbatches)
    saved = np.concatenate([first.saved_bytes, second.saved_bytes])
    largest = np.concatenate([first.largest_bytes, second.largest_bytes])
    activations = (flight - 1) * saved + np.maximum(saved, largest)
    buffers = np.concatenate([first.working_bytes, second.working_bytes])
    wide = request.training.element_bytes
    # Two microbatches each way: one being computed, one being sent.
    encoder_edge = 4 * wide * encoder.load.rows[0] * encoder.module.hidden_size
    llm_edge = 4 * wide * llm.load.rows[0] * llm.module.hidden_size
    buffers[: topology.encoder_stages] += encoder_edge
    buffers[topology.encoder_stages :] += llm_edge
    if request.deferral:
        buffers[topology.encoder_stages] += _feature_bytes(request, encoder)
    state = np.concatenate([first.state_bytes, second.state_bytes])
    return state, activations, buffers, flight


def memory_excess(request: PlanRequest, book: CostBook, candidate: Candidate) -> float:
    """Bytes by which the fullest stage exceeds the device; negative if all fit."""
    state, activations, buffers, _ = stage_memory(request, book, candidate)
    return float((state + activations + buffers).max() - request.cluster.usable_bytes)


def to_plan(request: PlanRequest, book: CostBook, candidate: Candidate) -> ParallelPlan:
    """The candidate as a plan with all its predictions."""
    topology = candidate.topology
    state, activations, buffers, flight = stage_memory(request, book, candidate)
    encoder, llm = _modules(book, topology)
    first, second = encoder.stages(topology.encoder_stages), llm.stages(topology.llm_stages)
    stages = stage_predictions((first, second), state, activations, buffers, flight)
    tokens = float(request.table.num_tokens.mean()) * request.global_batch_size
    work = np.array(
        [first.time_ms.sum() * topology.encoder_tp, second.time_ms.sum() * topology.llm_tp]
    )
    shares = work / max(work.sum(), 1e-30)
    return ParallelPlan(
        dp=topology.dp,
        encoder_layers=first.layers,
        llm_layers=second.layers,
        encoder_tp=topology.encoder_tp,
        llm_tp=topology.llm_tp,
        num_microbatches=candidate.num_microbatches,
        global_batch_size=request.global_batch_size,
        proportions={"encoder": float(shares[0]), "llm": float(shares[1])},
        stages=stages,
        iteration_ms=candidate.iteration_ms,
        tokens_per_s=tokens / candidate.iteration_ms * 1e3,
        limited_by=_limit(candidate, stages),
        model=request.model.name,
        cluster=f"{request.cluster.num_gpus} x {request.cluster.device.name}",
        cost_model=request.cost_model.name,
    )


def _limit(candidate: Candidate, stages: tuple[StagePrediction, ...]) -> str:
    stage = stages[candidate.bottleneck]
    busy = candidate.num_microbatches * candidate.bottleneck_ms
    idle = candidate.iteration_ms - busy - candidate.reduce_ms
    times = [item.time_ms for item in stages]
    return (
        f"{stage.module} layers {stage.start}-{stage.stop - 1} ({candidate.bottleneck_ms:.1f} ms "
        f"per microbatch, {max(times) / (sum(times) / len(times)):.2f} x the mean stage); filling "
        f"and draining {100 * idle / candidate.iteration_ms:.0f} %, gradient reduction "
        f"{100 * candidate.reduce_ms / candidate.iteration_ms:.0f} % of the step"
    )


def _modules(book: CostBook, topology: Topology) -> tuple[ModuleCosts, ModuleCosts]:
    size = topology.microbatch_size
    return (
        book.costs("encoder", topology.encoder_tp, size),
        book.costs("llm", topology.llm_tp, size),
    )


def _feature_bytes(request: PlanRequest, encoder: ModuleCosts) -> float:
    return float(
        encoder.load.merged[0] * encoder.module.output_size * request.training.element_bytes
    )


def _transfer_ms(
    request: PlanRequest, topology: Topology, encoder: ModuleCosts, llm: ModuleCosts
) -> float:
    """One message over each boundary, there and back."""
    wide = request.training.element_bytes
    inside = (
        (topology.encoder_stages - 1) * encoder.load.rows[0] * encoder.module.hidden_size * wide
    )
    inside += (topology.llm_stages - 1) * llm.load.rows[0] * llm.module.hidden_size * wide
    return float(
        2 * (inside + _feature_bytes(request, encoder)) / (request.cluster.network_gbps * 1e6)
    )


def _reduce_ms(
    request: PlanRequest, topology: Topology, first: StageTotals, second: StageTotals
) -> float:
    """Ring all-reduce of the largest stage's gradients over the replicas."""
    if topology.dp == 1:
        return 0.0
    largest = max(float(first.gradient_bytes.max()), float(second.gradient_bytes.max()))
    share = 2 * (topology.dp - 1) / topology.dp
    return share * largest / (request.cluster.network_gbps * 1e6)
