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
        ties: Groups of two ranks that hold copies of one parameter.
    """

    control: Group | None = None
    pipeline: Group | None = None
    replicas: Group | None = None
    channels: dict[tuple[int, int], Group] = field(default_factory=dict)
    ties: dict[tuple[int, int], Group] = field(default_factory=dict)


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
    me = dist.get_rank()
    groups.control = dist.new_group(backend="gloo", timeout=timeout)
    # Every rank makes every group in this order: group names count up with each call, also on
    # ranks that are not members.
    bases = [replica * layout.num_ranks for replica in range(layout.num_replicas)]
    for base in bases:
        members = list(range(base, base + layout.num_ranks))
        groups.pipeline = _join(members, me, timeout) or groups.pipeline
    if layout.num_replicas > 1:
        for rank in range(layout.num_ranks):
            members = [base + rank for base in bases]
            groups.replicas = _join(members, me, timeout) or groups.replicas
    for base in bases:
        for low, high in neighbour_pairs(layout):
            for source, target in ((low, high), (high, low)):
                group = _join([base + low, base + high], me, timeout)
                if group is not None:
                    groups.channels[base + source, base + target] = group
    _warm_up(groups, device)
    return groups


def _join(members: list[int], me: int, timeout: timedelta) -> Group | None:
    group = dist.new_group(members, timeout=timeout)
    return group if me in members else None


def _warm_up(groups: PipelineGroups, device: torch.device) -> None:
    """Open every channel now: NCCL creates its communicators at the first message."""
    me = dist.get_rank()
    for (source, target), group in groups.channels.items():
        token = torch.zeros(1, device=device)
        if me == source:
            dist.send(token, target, group=group)
        else:
            dist.recv(token, source, group=group)
