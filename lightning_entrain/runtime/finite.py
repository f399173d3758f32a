"""A loss that is no number is told once, without waiting for the device."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

_MAX_PENDING = 64


class FiniteCheck:
    """Looks at losses when they have arrived on the host, which may be a step later."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Tensor, Any]] = deque(maxlen=_MAX_PENDING)
        self._warned = False

    def reset(self) -> None:
        """A new run begins."""
        self._pending.clear()
        self._warned = False

    def flush(self) -> None:
        """Look at the last losses, waiting for them; at the end of a run."""
        while self._pending and not self._warned:
            step, loss, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            self._check(step, float(loss))

    def note(self, step: int, loss: Tensor) -> None:
        """Take a step's loss; warn at the first that is infinite or not a number.

        Args:
            step: Counted from 1.
            loss: 0-dim, on any device.
        """
        if self._warned:
            return
        arrived = None
        loss = loss.detach()
        if loss.is_cuda:
            on_host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            on_host.copy_(loss, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            loss = on_host
        self._pending.append((step, loss, arrived))
        while self._pending and not self._warned:
            step, loss, arrived = self._pending[0]
            if arrived is not None and not arrived.query():
                return
            self._pending.popleft()
            self._check(step, float(loss))

    def _check(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        self._warned = True
        self._pending.clear()
        rank_zero_warn(
            f"The loss of step {step} is {value}, and training goes on with it. Lower the learning "
            "rate, clip gradients (Trainer(gradient_clip_val=1.0)) or use another precision. "
            "Trainer(detect_anomaly=True) names the operation that made it; "
            "EarlyStopping('train/loss', check_finite=True) ends such a run. (Told once.)"
        )
