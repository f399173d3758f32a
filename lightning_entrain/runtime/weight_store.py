"""Weight gradients put aside by I and computed by W (zero bubble; Entrain, section 5.3).

Autograd runs once per backward, in I. Linear layers, which hold nearly all weight-gradient work,
leave their operands here instead of multiplying them; W does that later. All other parameters get
their gradients in I. The operands come from the backward itself, so activation checkpointing
recomputes once, and layers whose input needs no gradient are covered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_entrain.runtime.accumulate import GradientAccumulator


@dataclass(frozen=True)
class WeightWork:
    """The operands of one linear layer's weight gradient.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
        inputs: ``[..., in]``.
        gradient: Gradient of the output, ``[..., out]``.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    gradient: Tensor

    def products(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias; None where one is frozen or absent."""
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        weight = bias = None
        if self.weight.requires_grad:
            weight = gradient.T @ self.inputs.reshape(-1, self.inputs.shape[-1])
        if self.bias is not None and self.bias.requires_grad:
            bias = gradient.sum(0)
        return weight, bias


class WeightStore:
    """Collects the weight work of one I at a time, for the linear layers of a rank.

    Args:
        modules: The modules to search for linear layers.
        accumulator: Where gradients are added.
    """

    def __init__(self, modules: Iterable[nn.Module], accumulator: GradientAccumulator) -> None:
        self._accumulator = accumulator
        self._collected: list[WeightWork] | None = None
        self._enabled = False
        self._layers = [m for m in modules if type(m) is nn.Linear]
        for layer in self._layers:
            layer.forward = self._forward_of(layer)  # type: ignore[assignment,method-assign]

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._layers = []

    def enable(self, enabled: bool) -> None:
        """Whether forwards from now on are prepared for I and W."""
        self._enabled = enabled

    def collect(self, backward: Callable[[], None]) -> list[WeightWork]:
        """Run a backward without weight gradients of linear layers, and return what is left."""
        self._collected = []
        try:
            backward()
            return self._collected
        finally:
            self._collected = None

    def flush(self, work: Iterable[WeightWork]) -> None:
        """Compute the weight gradients that were put aside."""
        with torch.no_grad():
            for entry in work:
                for parameter, gradient in zip(
                    (entry.weight, entry.bias), entry.products(), strict=True
                ):
                    if gradient is not None and parameter is not None:
                        self._accumulator.add(parameter, gradient)

    def put(self, work: WeightWork) -> bool:
        """Keep the work for W; False if a full backward is running."""
        if self._collected is None:
            return False
        self._collected.append(work)
        return True

    def _forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            trained = layer.weight.requires_grad or (
                layer.bias is not None and layer.bias.requires_grad
            )
            if not (trained and self._enabled and torch.is_grad_enabled()):
                return F.linear(inputs, layer.weight, layer.bias)
            kind = inputs.device.type
            dtype = inputs.dtype
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
            return _SplitLinear.apply(inputs.to(dtype), layer.weight, layer.bias, self)

        return forward


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward can leave its weight gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, store: WeightStore
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved: recomputation would return detached copies, and W needs the parameters.
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        cast = None if bias is None else bias.to(inputs.dtype)
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(inputs, weight.to(inputs.dtype), cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        gradient = gradients[0]
        back = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        work = WeightWork(weight=weight, bias=bias, inputs=inputs, gradient=gradient)
        if ctx.store.put(work):
            return back, None, None, None
        for_weight, for_bias = work.products()
        return (
            back,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
        )
