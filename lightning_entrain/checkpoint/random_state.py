"""States of the random number generators of all ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

State = dict[str, Any]


def capture() -> State:
    """The generators of Python, NumPy and torch, as plain numbers and tensors."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: State = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put the generators back as :func:`capture` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((int(version), tuple(numbers.tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())


def gather(group: dist.ProcessGroup | None) -> list[State] | None:
    """The states of all ranks, on rank 0; None on other ranks. A collective.

    Args:
        group: All ranks, on the host; None in a job of one process.
    """
    own = capture()
    if group is None:
        return [own]
    found: list[Any] | None = None
    if dist.get_rank() == 0:
        found = [None] * dist.get_world_size(group)
    dist.gather_object(own, found, dst=0, group=group)
    return found


def of_rank(states: Sequence[State] | None, rank: int, world_size: int) -> State | None:
    """What a rank goes on with: its own state, or rank 0's where the number of ranks changed."""
    if not states:
        return None
    return states[rank] if len(states) == world_size else states[0]
