"""Gradients over replicas, and their norm over stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
LOW_PRECISION = (torch.bfloat16, torch.float16)
_MAX_IN_FLIGHT = 4
_Reduction = tuple[Any, Tensor, list[Tensor]]


def sum_over_replicas(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum ``p.grad`` over the replicas that hold the same stages.

    A replica without work for a parameter counts as zero; a parameter that no replica touched keeps
    no gradient, as on one process, so that optimizers skip it there as well.

    Args:
        parameters: The trainable parameters of this rank, in the same order on every replica.
        group: The ranks that hold them.
        bucket_bytes: Size of one reduction.
    """
    if not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    present = present.to(device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, touched in zip(parameters, present.tolist(), strict=True):
        if touched:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    pending: deque[_Reduction] = deque()
    for bucket in _buckets(gradients, bucket_bytes):
        if len(pending) == _MAX_IN_FLIGHT:  # each holds a copy of its gradients
            _finish(pending.popleft())
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        pending.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    while pending:
        _finish(pending.popleft())


def _finish(reduction: _Reduction) -> None:
    work, flat, bucket = reduction
    work.wait()
    offset = 0
    for gradient in bucket:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def _buckets(gradients: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        same = bool(buckets) and buckets[-1][0].dtype == gradient.dtype
        if not same or size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel() * gradient.element_size()
    return buckets


def global_norm(
    gradients: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """Euclidean norm over the gradients of all stages of a replica.

    Args:
        gradients: This rank's gradients.
        device: Where the sum is formed; a rank may have no gradient at all.
        group: The ranks of the replica; None in a job of one process.
    """
    square = torch.zeros((), dtype=torch.float64, device=device)
    low = [gradient for gradient in gradients if gradient.dtype in LOW_PRECISION]
    rest = [gradient for gradient in gradients if gradient.dtype not in LOW_PRECISION]
    if rest:
        square += torch.nn.utils.get_total_norm(rest).double() ** 2
    if low:  # torch would round each tensor's norm, and their sum, to the gradients' type
        norms = torch._foreach_norm(low, 2.0, dtype=torch.float32)
        square += torch.stack(list(norms)).double().square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a factor that is not rounded to their type.

    Args:
        gradients: Of any floating types.
        factor: 0-dim, float32 or wider.
    """
    rest = []
    for gradient in gradients:
        if gradient.dtype in LOW_PRECISION:
            gradient.copy_(gradient.float() * factor)
        else:
            rest.append(gradient)
    if rest:
        torch._foreach_mul_(rest, factor)


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients down to a norm, as :func:`torch.nn.utils.clip_grads_with_norm_` does.

    Args:
        gradients: This rank's gradients.
        max_norm: Largest norm.
        norm: Over all ranks, float32.
    """
    scale_gradients(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def copy_from_first_replica(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give every replica the first one's values, so that all start equal."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(tensor, source, group=group)
