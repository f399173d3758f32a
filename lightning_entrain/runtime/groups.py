"""Process groups of a pipeline job, created in one global order on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_entrain.plan.layout import StageLayout

Group = dist.ProcessGroup


@dataclass
class PipelineGroups:
    """The groups one rank takes part in. All are None or empty in a job of one process.

    Attributes:
        control: All ranks, gloo on the host: digests, checkpoints, errors.
        pipeline: The ranks of this replica.
        replicas: The ranks that hold the same stages in every replica.
        channels: One group per ordered pair of neighbours, keyed (source, target) by global rank,
            so that each direction has its own order of messages.
    """

    control: Group | None = None
    pipeline: Group | None = None
    replicas: Group | None = None
    channels: dict[tuple[int, int], Group] = field(default_factory=dict)


def neighbour_pairs(layout: StageLayout) -> list[tuple[int, int]]:
    """Ranks inside a replica that exchange boundary tensors, as sorted (low, high) pairs."""
    owner = layout.placement.stage_to_rank
    pairs = {(min(a, b), max(a, b)) for a, b in pairwise(owner) if a != b}
    return sorted(pairs)


def create_groups(layout: StageLayout, device: torch.device, timeout: timedelta) -> PipelineGroups:
    """Create this rank's groups; every rank of the job calls this at the same time.

    Args:
        layout: Stages and replicas of the job.
        device: The rank's device, which sets the backend of the channels.
        timeout: How long a collective or a message may take before it raises.
    """
    groups = PipelineGroups()
    if not dist.is_initialized():
        return groups
    replica, rank = layout.split(dist.get_rank())
    base = replica * layout.num_ranks
    groups.control = dist.new_group(backend="gloo", timeout=timeout)
    groups.pipeline = dist.new_group(
        list(range(base, base + layout.num_ranks)), timeout=timeout, use_local_synchronization=True
    )
    if layout.num_replicas > 1:
        same_stage = [r * layout.num_ranks + rank for r in range(layout.num_replicas)]
        groups.replicas = dist.new_group(
            same_stage, timeout=timeout, use_local_synchronization=True
        )
    for low, high in neighbour_pairs(layout):
        if rank not in (low, high):
            continue
        for source, target in ((low, high), (high, low)):
            groups.channels[base + source, base + target] = dist.new_group(
                [base + low, base + high], timeout=timeout, use_local_synchronization=True
            )
    _warm_up(groups, device)
    return groups


def _warm_up(groups: PipelineGroups, device: torch.device) -> None:
    """Open every channel now: NCCL creates its communicators at the first message."""
    me = dist.get_rank()
    for (source, target), group in groups.channels.items():
        token = torch.zeros(1, device=device)
        if me == source:
            dist.send(token, target, group=group)
        else:
            dist.recv(token, source, group=group)
