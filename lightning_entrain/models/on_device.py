"""Moving to the device and choosing rows there, without making the host wait for the device.

A host that waits inside a microbatch cannot queue the next action in time. It waits where a number
of rows is known to the device alone (indexing by a mask), and at copies from pageable memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device | str) -> Tensor:
    """A tensor of host values on a device; the copy runs in the device's own time.

    Args:
        values: What ``torch.as_tensor`` takes, on the host.
        device: Where it goes.
    """
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def chosen_rows(mask: Tensor, num_chosen: int) -> Tensor:
    """Indices of the true elements of a mask, in order, whose number the host knows.

    Args:
        mask: ``[rows]``, bool.
        num_chosen: How many are true.

    Returns:
        ``[num_chosen]``, int64.
    """
    return mask.to(torch.uint8).argsort(descending=True, stable=True)[:num_chosen]
