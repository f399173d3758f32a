"""Logs how much is trained per second, and what share of the time trains nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_entrain.callbacks.monitor import StepMonitor, check_interval, step_ends, step_index
from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.batch_costs import BatchCosts
from lightning_entrain.observe.wandb_log import define_sections
from lightning_entrain.workload.hardware import DEVICES, Device, device


@dataclass
class _Window:
    """What was counted since the last logged values."""

    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_vision_tokens: int = 0
    flops: float = 0.0
    train_seconds: float = 0.0
    data_seconds: float = 0.0
    planning_seconds: float = 0.0


class ThroughputMonitor(StepMonitor):
    """Logs rates over the whole job, averaged over the steps since the last values.

    The first step is left out, for it warms up. So is what happens between training steps besides
    waiting for data: validation, checkpoints. Rates count that wait, for the job waits too. Each
    rank measures by its own clock, without a word to the others; rank 0's values are logged.

    | key | meaning | unit |
    | --- | --- | --- |
    | `throughput/samples_per_sec` | samples trained, all replicas | samples/s |
    | `throughput/tokens_per_sec` | LLM tokens trained, vision and text | tokens/s |
    | `throughput/vision_tokens_per_sec` | of them, merged vision tokens | tokens/s |
    | `throughput/step_seconds` | one global batch with its optimizer step | s |
    | `throughput/tflops_per_device` | model FLOPs trained, per device | TFLOPS |
    | `throughput/mfu` | the same over the named device's dense peak | none |
    | `throughput/data_wait_share` | share of the time spent waiting for the next batch | none |
    | `throughput/planning_share` | time to plan a step over a step's time | none |

    A step's planning time counts wherever it is planned, in a loader's worker too.

    Model FLOPs are known for models built from Hugging Face configurations. They count what
    training asks for: forward everywhere, gradients of inputs behind the first trained layer,
    gradients of weights for what is trained, so frozen modules and LoRA count less than full
    training. By the convention of model FLOPs utilisation they do not count recomputation, which
    makes `mfu` smaller than the share of the time that the device computes. `mfu` needs a device: a
    CUDA device that is known by name, or the one named here; a CPU has none.

    Args:
        every_n_steps: Steps between two values; None takes the trainer's `log_every_n_steps`.
        device_name: A name of `workload.hardware.DEVICES`, for example `h100`; None finds out.

    Raises:
        ConfigError: If the interval is below 1 or the device is unknown.
    """

    def __init__(self, every_n_steps: int | None = None, device_name: str | None = None) -> None:
        self.every_n_steps = None if every_n_steps is None else check_interval(every_n_steps)
        if device_name is not None and device_name not in DEVICES:
            raise ConfigError(
                f"device_name is {device_name!r}",
                limit=f"one of {', '.join(DEVICES)}",
                remedy="name one of these, or leave device_name out",
            )
        self.device_name = device_name
        self._costs: BatchCosts | None = None
        self._window = _Window()
        self._started = self._idle_since = 0.0
        self._seen_steps = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what samples cost."""
        self._costs = BatchCosts.shared(trainer, pl_module)
        self._window, self._seen_steps, self._idle_since = _Window(), 0, 0.0
        define_sections(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock; the time since the last step was the wait for this batch."""
        self._started = time.perf_counter()
        if self._idle_since:
            self._window.data_seconds += self._started - self._idle_since
            self._idle_since = 0.0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What came before was no wait for data."""
        if self._idle_since:
            self._idle_since = time.perf_counter()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What came before was no wait for data."""
        self.on_validation_end(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop the clock, count, and log where it is time to."""
        self._idle_since = time.perf_counter()
        self._seen_steps += 1
        if self._seen_steps == 1:
            return
        self._count(trainer, batch)
        interval = self.every_n_steps or max(getattr(trainer, "log_every_n_steps", 1), 1)
        if not step_ends(trainer) or (step_index(trainer) + 1) % interval:
            return
        window, self._window = self._window, _Window()
        values = self._values(trainer, window)
        self.log_step(trainer, pl_module, values)

    def _count(self, trainer: pl.Trainer, batch: Any) -> None:
        window = self._window
        window.num_steps += 1
        window.train_seconds += self._idle_since - self._started
        assert self._costs is not None
        costs = self._costs
        table = costs.table_of(batch)
        window.num_samples += len(table)
        window.num_tokens += int(table.num_tokens.sum())
        window.num_vision_tokens += int(table.num_vision_tokens.sum())
        plan = getattr(trainer.strategy, "last_step_plan", None)
        if plan is not None:
            window.planning_seconds += plan.planning_ms / 1e3
        if costs.workload is not None:
            window.flops += costs.workload.step_flops(table)

    def _values(self, trainer: pl.Trainer, window: _Window) -> dict[str, float]:
        elapsed = max(window.train_seconds + window.data_seconds, 1e-9)
        values = {
            "throughput/samples_per_sec": window.num_samples / elapsed,
            "throughput/tokens_per_sec": window.num_tokens / elapsed,
            "throughput/vision_tokens_per_sec": window.num_vision_tokens / elapsed,
            "throughput/step_seconds": window.train_seconds / max(window.num_steps, 1),
            "throughput/data_wait_share": window.data_seconds / elapsed,
        }
        if hasattr(trainer.strategy, "last_step_plan"):
            values["throughput/planning_share"] = window.planning_seconds / elapsed
        if window.flops:
            achieved = window.flops / elapsed / trainer.world_size / 1e12
            values["throughput/tflops_per_device"] = achieved
            peak = self._peak_tflops(trainer)
            if peak is not None:
                values["throughput/mfu"] = achieved / peak
        return values

    def _peak_tflops(self, trainer: pl.Trainer) -> float | None:
        workload = self._costs.workload if self._costs is not None else None
        known: Device | None = device(self.device_name) if self.device_name else None
        if known is None and workload is not None and trainer.strategy.root_device.type == "cuda":
            known = workload.device
        if known is None:
            return None
        half = str(trainer.precision).startswith(("bf16", "16"))
        return known.peak("bfloat16" if half else "float32")
