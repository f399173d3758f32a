"""Point-to-point messages whose shapes are known before they arrive."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.runtime.groups import PipelineGroups
from lightning_entrain.schedule.lower import Message

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class Transfers:
    """Sends and receives of one rank.

    Sends do not wait, but at most ``window`` of them are in flight: gloo completes a send only
    when its receive is posted, and each holds its tensor until then.

    Args:
        groups: The rank's channels.
        device: Where receive buffers live.
        base: Global rank of this replica's first rank.
        window: Sends in flight at most.
    """

    def __init__(
        self, groups: PipelineGroups, device: torch.device, *, base: int, window: int = 8
    ) -> None:
        self._groups = groups
        self._device = device
        self._base = base
        self._window = window
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._receives: dict[Message, tuple[dist.Work, Tensor]] = {}

    def post_receive(self, message: Message) -> None:
        """Post the receive of a message; :meth:`take` waits for it."""
        source, group = self._peer(message, message.source_rank)
        buffer = torch.empty(
            (message.rows, message.columns), dtype=DTYPES[message.dtype], device=self._device
        )
        work = dist.irecv(buffer, source, group=group, tag=message.tag)
        assert work is not None
        self._receives[message] = (work, buffer)

    def take(self, message: Message) -> Tensor:
        """Wait for a posted receive and return its tensor ``[rows, columns]``."""
        work, buffer = self._receives.pop(message)
        work.wait()
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send a tensor without waiting for its receiver.

        Raises:
            RuntimeMismatchError: If the tensor is not what the schedule announced.
        """
        found = (tuple(tensor.shape), tensor.dtype)
        planned = ((message.rows, message.columns), DTYPES[message.dtype])
        if found != planned:
            raise RuntimeMismatchError(
                f"{message} has shape {found[0]} and dtype {found[1]}",
                limit=f"planned are {planned[0]} and {planned[1]}",
            )
        while len(self._sends) >= self._window:
            self._sends.popleft()[0].wait()
        target, group = self._peer(message, message.target_rank)
        data = tensor.contiguous()
        work = dist.isend(data, target, group=group, tag=message.tag)
        assert work is not None
        self._sends.append((work, data))

    def drain(self) -> None:
        """Wait for every send; called at the end of a step."""
        while self._sends:
            self._sends.popleft()[0].wait()
        if self._receives:
            left = ", ".join(str(message) for message in self._receives)
            self._receives.clear()
            raise RuntimeMismatchError(f"Received but never used: {left}")

    def reset(self) -> None:
        """Forget everything in flight, after a failed step."""
        self._sends.clear()
        self._receives.clear()

    def _peer(self, message: Message, peer: int) -> tuple[int, dist.ProcessGroup]:
        key = (self._base + message.source_rank, self._base + message.target_rank)
        return self._base + peer, self._groups.channels[key]
