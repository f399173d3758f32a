"""Precision in a pipeline: types that travel, and clipping over all stages."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_entrain.errors import ConfigError
from lightning_entrain.runtime.gradients import clip_by_norm, global_norm
from lightning_entrain.runtime.stopping import StoppingStrategy

WIRE_DTYPES = {
    "32-true": "float32",
    "64-true": "float64",
    "bf16-true": "bfloat16",
    "bf16-mixed": "bfloat16",
}
"""Type of what ranks send each other, by Lightning's name of the precision."""


class PipelinePrecision(StoppingStrategy):
    """Clips by the norm over all stages, and knows which precisions a pipeline can have."""

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, clipping by the norm over all stages."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            plugin.clip_grad_by_norm = self._clip_by_global_norm  # type: ignore[method-assign]
            plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]
        self._precision_plugin = plugin

    def _check_precision(self) -> None:
        if str(self.precision_plugin.precision) not in WIRE_DTYPES:
            raise ConfigError(
                f"precision={self.precision_plugin.precision!r}",
                limit=f"one of {', '.join(sorted(WIRE_DTYPES))}",
                remedy="use bf16-mixed; a loss scaler would need one scale over all stages",
            )

    def _clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        plugin = self.precision_plugin
        if self._one_stage:
            type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)
            return
        parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
        twice = self._tied.seconds if self._tied is not None else set()
        gradients = [p.grad for p in parameters if p.grad is not None and p not in twice]
        norm = global_norm(gradients, self.root_device, self._groups.pipeline)
        clip_by_norm([p.grad for p in parameters if p.grad is not None], clip_val, norm)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        plugin = self.precision_plugin
        if any(p.grad is not None for p in plugin.main_params(optimizer)):  # torch wants one
            type(plugin).clip_grad_by_value(plugin, optimizer, clip_val)
