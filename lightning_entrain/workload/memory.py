"""Memory of layers and stages: what is stored, what backward needs, what is passed on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.layers import Axis, Layer
from lightning_entrain.workload.shapes import FloatArray, Load

Precision = Literal["32-true", "bf16-true", "bf16-mixed"]
Optimizer = Literal["adamw", "sgd_momentum", "sgd"]
TrainMode = Literal["full", "lora", "frozen"]

_STATES = {"adamw": 2, "sgd_momentum": 1, "sgd": 0}
_WEIGHT_BYTES = {"32-true": 4, "bf16-true": 2, "bf16-mixed": 4}
_COMPUTE_BYTES = {"32-true": 4, "bf16-true": 2, "bf16-mixed": 2}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and in which number format.

    Attributes:
        encoder: ``full``, ``lora`` or ``frozen``.
        projector: The same for the projector, which is often trained alone.
        llm: The same for the LLM.
        lora_rank: Rank of the adapters where a module is in mode ``lora``.
        precision: Lightning's names. ``bf16-mixed`` keeps fp32 weights and computes in bf16.
        optimizer: Decides the states per trained parameter.
        recompute: Keep only each block's input and run its forward again in backward.
        recomputed: Part of the encoder's and of the LLM's blocks whose forward runs again; None for
            all of them where `recompute` is set, and for none elsewhere.
    """

    encoder: TrainMode = "full"
    projector: TrainMode = "full"
    llm: TrainMode = "full"
    lora_rank: int = 16
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    recompute: bool = False
    recomputed: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("encoder", "projector", "llm"):
            _check(f"training.{name}", getattr(self, name), ("full", "lora", "frozen"))
        _check("training.precision", self.precision, tuple(_WEIGHT_BYTES))
        _check("training.optimizer", self.optimizer, tuple(_STATES))
        if self.lora_rank < 1:
            raise ConfigError(f"training.lora_rank is {self.lora_rank}", limit="at least 1")

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation element."""
        return _COMPUTE_BYTES[self.precision]

    @property
    def dtype(self) -> str:
        """Number format that matrices are multiplied in."""
        return "float32" if self.precision == "32-true" else "bfloat16"

    def mode_of(self, module: str, layer: Layer) -> TrainMode:
        """How a layer of ``encoder`` or ``llm`` is trained."""
        if layer.kind == "projector":
            return self.projector
        return self.encoder if module == "encoder" else self.llm

    def recomputed_forwards(self, module: str, layer: Layer) -> float:
        """How often a layer's forward runs again in a backward, on average; 0 to 1."""
        if layer.attention is None:
            return 0.0
        if self.recomputed is None:
            return float(self.recompute)
        return self.recomputed[0 if module == "encoder" else 1]

    def needs_input_gradient(self, module: str, layer: Layer) -> bool:
        """Whether gradients flow through the layer to something trained in front of it."""
        if layer.kind == "patch_embed":
            return False
        if module == "encoder":
            return self.encoder != "frozen"
        behind = [self.encoder, self.projector, self.llm]
        if layer.kind == "embedding":
            behind = behind[:2]
        return any(mode != "frozen" for mode in behind)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}", limit=f"one of {', '.join(known)}")


def saved_bytes(
    layer: Layer,
    load: Load,
    *,
    element_bytes: int,
    mode: TrainMode = "full",
    needs_input_gradient: bool = True,
    tp: int = 1,
    lora_rank: int = 16,
) -> FloatArray:
    """Bytes that autograd keeps of one layer between its forward and its backward.

    Args:
        layer: The layer.
        load: What it processes.
        element_bytes: Bytes of an activation element.
        mode: How it is trained.
        needs_input_gradient: Whether a gradient flows through it.
        tp: Tensor-parallel ranks; sharded tensors are divided among them.
        lora_rank: Rank of the adapters in mode ``lora``.
    """
    trained = mode != "frozen"
    total = 0.0 * load.rows
    if not trained and not needs_input_gradient:
        return total
    for item in layer.saved:
        if item.for_weights and not trained:
            continue
        rows = load.merged if item.axis is Axis.MERGED else load.rows
        total = total + item.bytes_per_row(element_bytes) / (tp if item.split else 1) * rows
    if mode == "lora":
        for linear in layer.linears:
            rows = load.merged if linear.axis is Axis.MERGED else load.rows
            total = total + lora_rank * linear.active * element_bytes * rows
    return total


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Memory of a stage that does not depend on the samples.

    Attributes:
        parameters: Weights.
        gradients: Gradients of trained weights.
        optimizer: Optimizer states of trained weights.
        num_parameters: Parameters stored.
        num_trained: Parameters trained.
    """

    parameters: float
    gradients: float
    optimizer: float
    num_parameters: float
    num_trained: float

    @property
    def total(self) -> float:
        """All of it in bytes."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    module: str, layers: Iterable[Layer], training: Training, *, tp: int = 1
) -> StateBytes:
    """Weights, gradients and optimizer states of a stage on one rank.

    A tied head and embedding are counted once when both are among ``layers``; on different stages
    each stage keeps its copy.

    Args:
        module: ``encoder`` or ``llm``.
        layers: The stage's layers.
        training: What is trained, precision, optimizer.
        tp: Tensor-parallel ranks that share the stage.
    """
    stored = trained = 0.0
    has_embedding = False
    for layer in layers:
        has_embedding = has_embedding or layer.kind == "embedding"
        count = layer.parameters_per_rank(tp)
        if layer.shared_parameters and has_embedding:
            count -= layer.shared_parameters / tp
        mode = training.mode_of(module, layer)
        if mode == "lora":
            extra = layer.adapter_parameters(training.lora_rank) / tp
            stored += count + extra
            trained += extra
        else:
            stored += count
            trained += count if mode == "full" else 0.0
    size = _WEIGHT_BYTES[training.precision]
    return StateBytes(
        parameters=stored * size,
        gradients=trained * size,
        optimizer=trained * size * _STATES[training.optimizer],
        num_parameters=stored,
        num_trained=trained,
    )


def stage_saved_bytes(
    module: str, layers: Iterable[Layer], load: Load, training: Training, *, tp: int = 1
) -> FloatArray:
    """Bytes one microbatch keeps on a stage from its forward to its backward.

    With ``training.recompute`` each block keeps its input alone.
    """
    total = 0.0 * load.rows
    for layer in layers:
        mode = training.mode_of(module, layer)
        flows = training.needs_input_gradient(module, layer)
        if training.recompute and layer.attention is not None:
            if mode != "frozen" or flows:
                total = total + layer.linears[0].in_features * training.element_bytes * load.rows
            continue
        total = total + saved_bytes(
            layer,
            load,
            element_bytes=training.element_bytes,
            mode=mode,
            needs_input_gradient=flows,
            tp=tp,
            lora_rank=training.lora_rank,
        )
    return total
