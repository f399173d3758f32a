"""Adding up the gradients of a step's many backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_entrain.runtime.gradients import LOW_PRECISION


class GradientAccumulator:
    """Sums gradients of low-precision parameters in float32.

    A step makes one small backward per microbatch, segment and stage. Added up in bfloat16, which
    has 8 significant bits, the later ones would vanish.

    Args:
        parameters: The trainable parameters of a rank.
        full_precision: Sum in float32 (the default) or in the parameters' own type.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, full_precision: bool = True) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._collecting = False
        self._parameters = [p for p in parameters if p.requires_grad]
        self._low = {p for p in self._parameters if full_precision and p.dtype in LOW_PRECISION}
        self._hooks = [p.register_post_accumulate_grad_hook(self._absorb) for p in self._low]

    def remove(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._sums.clear()

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that autograd did not see."""
        if parameter in self._low:
            self._add_low(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad.add_(gradient)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Only inside are gradients absorbed: those of the user's own backward pass by."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False

    def take(self) -> list[Tensor | None]:
        """The sums in the parameters' order and type; the parameters are left without gradients."""
        found: list[Tensor | None] = []
        for parameter in self._parameters:
            gradient = self._sums.pop(parameter, None)
            if gradient is None:
                gradient, parameter.grad = parameter.grad, None
            else:
                gradient = gradient.to(parameter.dtype)
            found.append(gradient)
        return found

    def clear(self) -> None:
        """Forget the sums of a step that failed."""
        self._sums.clear()

    def _absorb(self, parameter: Tensor) -> None:
        if not self._collecting:
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._add_low(parameter, gradient)

    def _add_low(self, parameter: Tensor, gradient: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()
