"""Transfers between the stages of a plan on a cluster."""

from __future__ import annotations

from lightning_entrain.schedule.simulate import Link
from lightning_entrain.simulation.stage_plan import StagePlan
from lightning_entrain.workload.hardware import Cluster
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import ModelShape


def plan_link(
    plan: StagePlan,
    model: ModelShape,
    cluster: Cluster,
    training: Training,
    *,
    latency_us: float = 10.0,
) -> Link:
    """Every boundary at the network's bandwidth: neighbouring stages may lie on other nodes.

    Args:
        plan: The stages.
        model: Widths of the tensors between them.
        cluster: Its network, GB/s per GPU.
        training: Number format of activations.
        latency_us: Of one message.
    """
    encoder, llm = model.modules
    num_encoder, num_llm = len(plan.encoder_layers), len(plan.llm_layers)
    columns = (
        [encoder.hidden_size] * (num_encoder - 1)
        + [encoder.output_size]
        + [llm.hidden_size] * (num_llm - 1)
    )
    return Link(
        boundary_columns=tuple(columns),
        bytes_per_value=training.element_bytes,
        bytes_per_ms=cluster.network_gbps * 1e6,
        latency_ms=latency_us / 1e3,
    )
