"""Timing the real layers of a model on the present device."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.decoder import DecoderLlm
from lightning_entrain.models.protocol import EncoderPacking, LlmPacking
from lightning_entrain.models.qwen_vision import QwenVisionEncoder
from lightning_entrain.profile_estimate import (
    CPU_SIZES,
    REPEATED_BLOCKS,
    SIZES,
    counts_of,
)
from lightning_entrain.profile_timing import Clock as Clock
from lightning_entrain.profile_timing import spread
from lightning_entrain.profile_timing import time_call as time_call
from lightning_entrain.this_cpu import cpu_name
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.layers import Layer
from lightning_entrain.workload.measured import (
    LayerProfile,
    Measurement,
    Profile,
    fit_times,
    layer_key,
    layer_rows_and_pairs,
)
from lightning_entrain.workload.shapes import ModuleShape
from lightning_entrain.workload.sizes import Grid
from lightning_entrain.workload.tables import SizeTable


@dataclass(frozen=True, kw_only=True)
class Call:
    """One thing to time.

    Attributes:
        layer: The layer it stands for.
        table: The sizes it processes, for rows and pairs.
        module: ``encoder`` or ``llm``.
        run: Forward; returns a tensor that can be back-propagated.
        divide: Equal layers inside.
    """

    layer: Layer
    table: SizeTable
    module: ModuleShape
    run: Callable[[], Tensor]
    divide: int = 1


def profile_model(
    config: Mapping[str, Any],
    *,
    name: str = "",
    device: str = "cpu",
    dtype: str = "float32",
    sizes: Sequence[int] | None = None,
    seconds_per_point: float = 1.0,
    clock: Clock = time.perf_counter,
    advance: Callable[[], None] | None = None,
) -> Profile:
    """Time every distinct layer of a model forward and backward and fit the times.

    Layers are built from the configuration with random weights; a few of each kind, so that large
    models can be measured too. Each size is timed as one sequence and as four of a quarter.

    Args:
        config: Configuration with ``vision_config`` (Qwen2.5-VL) and ``text_config`` (a decoder).
        name: Name for tables and messages.
        device: ``cpu`` or a torch device such as ``cuda``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        sizes: Rows per call; None takes :func:`default_sizes`.
        seconds_per_point: About how long to repeat each size and direction.
        clock: Seconds; ``time.process_time`` with one thread ignores other programs on a CPU.
        advance: Called after each of the timings.

    Raises:
        ConfigError: If the model, device, dtype or sizes cannot be used.
    """
    sizes = default_sizes(device) if sizes is None else sizes
    place, number_format = check_options(device, dtype, sizes)
    shape = model_shape(config, name=name)
    encoder = build_encoder(config, shape.encoder).to(place, number_format)
    llm = build_llm(config, shape.llm).to(place, number_format)
    makers = [
        *_encoder_makers(encoder, shape.encoder, place, number_format),
        *_llm_makers(llm, shape.llm, place, number_format),
    ]
    layers = [
        _measure_layer(make, sizes, seconds_per_point, place, clock, advance or (lambda: None))
        for make in makers
    ]
    return Profile(
        device=device_name(place),
        dtype=dtype,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        threads=torch.get_num_threads(),
        model=name,
        layers=tuple(layers),
    )


def check_options(
    device: str, dtype: str, sizes: Sequence[int]
) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of these names.

    Raises:
        ConfigError: If one of the three cannot be used.
    """
    if not sizes or min(sizes) < 4:
        raise ConfigError(f"sizes is {list(sizes)}", limit="at least one, each at least 4 rows")
    return _device(device), _dtype(dtype)


def default_sizes(device: str) -> tuple[int, ...]:
    """Rows per call where none are given: fewer on a CPU, which would take minutes."""
    return CPU_SIZES if device.startswith("cpu") else SIZES


def device_name(place: torch.device) -> str:
    """The name under which plans know a device."""
    if place.type == "cpu":
        return cpu_name()
    full = torch.cuda.get_device_name(place)
    short = full.lower().replace("nvidia", "").replace("geforce", "").replace(" ", "")
    memory = torch.cuda.get_device_properties(place).total_memory / 2**30
    if short.startswith("a100"):
        return "a100-80" if memory > 60 else "a100-40"
    for known in ("a40", "h100", "h200", "l40s", "b200", "rtx4090"):
        if short.startswith(known):
            return known
    return full


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"dtype is {name!r}", limit=f"one of {', '.join(known)}")
    return known[name]


def _device(name: str) -> torch.device:
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}", limit="cpu or cuda") from error
    if place.type not in ("cpu", "cuda") or (
        place.type == "cuda" and not torch.cuda.is_available()
    ):
        raise ConfigError(
            f"device is {name!r}", limit="a device that is here", remedy="set device=cpu"
        )
    return place


def distinct_blocks(module: ModuleShape) -> tuple[Layer, ...]:
    """Blocks of different shape, in order of appearance."""
    return tuple(dict.fromkeys(module.blocks))


def build_encoder(config: Mapping[str, Any], shape: ModuleShape) -> QwenVisionEncoder:
    """A vision encoder with one run of equal blocks per distinct shape, between two end blocks."""
    vision = dict(config["vision_config"])
    if not str(vision.pop("model_type")).startswith("qwen2_5"):
        raise ConfigError(
            "The vision encoder is not Qwen2.5-VL's",
            limit="an encoder that the runtime can run",
            remedy="plan with the analytic model",
        )
    kinds = distinct_blocks(shape)
    full = [
        index
        for position, layer in enumerate(kinds)
        if layer.attention is not None and layer.attention.window == 0
        for index in _run_of(position)
    ]
    vision.update(
        depth=len(kinds) * REPEATED_BLOCKS + 2,
        fullatt_block_indexes=full,
        out_hidden_size=shape.output_size,
    )
    model = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(
        qwen.Qwen2_5_VLVisionConfig(**vision), attn_implementation="sdpa"
    )
    return QwenVisionEncoder(model)


def build_llm(config: Mapping[str, Any], shape: ModuleShape) -> DecoderLlm:
    """A decoder with one run of equal blocks per distinct shape, between two end blocks."""
    text = dict(config.get("text_config") or config)
    if str(text["model_type"]).startswith("qwen2_5_vl"):
        text["model_type"] = "qwen2"
    kinds = distinct_blocks(shape)
    text["num_hidden_layers"] = len(kinds) * REPEATED_BLOCKS + 2
    text["pad_token_id"] = 0
    if any(layer.attention is not None and layer.attention.window for layer in kinds):
        inner = [
            "sliding_attention" if layer.attention and layer.attention.window else "full_attention"
            for layer in kinds
            for _ in range(REPEATED_BLOCKS)
        ]
        text["layer_types"] = [inner[0], *inner, inner[-1]]
    else:
        text.pop("layer_types", None)
    hf = transformers.AutoConfig.for_model(**text)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
    return DecoderLlm(model, image_token_id=-1)


def _run_of(position: int) -> range:
    start = 1 + position * REPEATED_BLOCKS
    return range(start, start + REPEATED_BLOCKS)


Maker = Callable[[int, int], Call]
"""Makes the call for (rows, sequences)."""


def _encoder_makers(
    encoder: Any, shape: ModuleShape, place: torch.device, dtype: torch.dtype
) -> list[Maker]:
    def grids(rows: int, count: int) -> tuple[Grid, ...]:
        side = max(2, 2 * round(math.sqrt(rows / count) / 2))
        return ((1, side, side),) * count

    def table(shapes: tuple[Grid, ...]) -> SizeTable:
        rows, columns = [g[1] for g in shapes], [g[2] for g in shapes]
        return SizeTable.from_single_images(
            rows, columns, [0] * len(shapes), merge_size=encoder.merge_size, window=shape.window
        )

    def block(position: int) -> Maker:
        layer, run = distinct_blocks(shape)[position], _run_of(position)

        def make(rows: int, count: int) -> Call:
            shapes = grids(rows, count)
            packing = EncoderPacking(grids=shapes)
            hidden = _random(packing.num_patches, shape.hidden_size, place, dtype)
            return Call(
                layer=layer,
                table=table(shapes),
                module=shape,
                run=lambda: encoder.forward_stage(hidden, packing, start=run[0], stop=run[-1] + 1),
                divide=len(run),
            )

        return make

    def patches(rows: int, count: int) -> Call:
        found = table(grids(rows, count))
        pixels = _random(int(found.num_patches.sum()), encoder.patch_dim, place, dtype, grad=False)
        return Call(
            layer=shape.prologue[0],
            table=found,
            module=shape,
            run=lambda: encoder.patch_embed(pixels),
        )

    def merger(rows: int, count: int) -> Call:
        found = table(grids(rows, count))
        hidden = _random(int(found.num_patches.sum()), shape.hidden_size, place, dtype)
        return Call(
            layer=shape.epilogue[0], table=found, module=shape, run=lambda: encoder.merger(hidden)
        )

    return [patches, *(block(i) for i in range(len(distinct_blocks(shape)))), merger]


def _llm_makers(
    llm: Any, shape: ModuleShape, place: torch.device, dtype: torch.dtype
) -> list[Maker]:
    def table(rows: int, count: int) -> SizeTable:
        zeros = [0] * count
        return SizeTable.from_single_images(zeros, zeros, [max(1, rows // count)] * count)

    def block(position: int) -> Maker:
        layer, run = distinct_blocks(shape)[position], _run_of(position)

        def make(rows: int, count: int) -> Call:
            found = table(rows, count)
            packing = LlmPacking(sample_lengths=tuple(found.num_tokens.tolist()))
            hidden = _random(packing.num_tokens, shape.hidden_size, place, dtype)
            return Call(
                layer=layer,
                table=found,
                module=shape,
                run=lambda: llm.forward_stage(hidden, packing, start=run[0], stop=run[-1] + 1),
                divide=len(run),
            )

        return make

    def embedding(rows: int, count: int) -> Call:
        found = table(rows, count)
        ids = torch.randint(0, shape.output_size, (int(found.num_tokens.sum()),), device=place)
        return Call(
            layer=shape.prologue[0],
            table=found,
            module=shape,
            run=lambda: llm.model.embed_tokens(ids),
        )

    def head(rows: int, count: int) -> Call:
        found = table(rows, count)
        total = int(found.num_tokens.sum())
        hidden = _random(total, shape.hidden_size, place, dtype)
        labels = torch.randint(0, shape.output_size, (total,), device=place)
        return Call(
            layer=shape.epilogue[0],
            table=found,
            module=shape,
            run=lambda: F.cross_entropy(
                llm.lm_head(llm.model.norm(hidden)).float(), labels, reduction="sum"
            ),
        )

    return [embedding, *(block(i) for i in range(len(distinct_blocks(shape)))), head]


def _random(
    rows: int, columns: int, place: torch.device, dtype: torch.dtype, grad: bool = True
) -> Tensor:
    return torch.randn(rows, columns, device=place, dtype=dtype, requires_grad=grad)


def _measure_layer(
    make: Maker,
    sizes: Sequence[int],
    seconds: float,
    place: torch.device,
    clock: Clock,
    advance: Callable[[], None],
) -> LayerProfile:
    measurements, layer = [], None
    for rows in sizes:
        for count in counts_of(rows):
            call = make(rows, count)
            layer = call.layer
            load = call.module.load(call.table).sum()
            own_rows, pairs = layer_rows_and_pairs(layer, load)
            forward, backward = time_call(call.run, seconds, place, clock)
            measurements.append(
                Measurement(
                    rows=int(own_rows[0]),
                    pairs=int(pairs[0]),
                    forward_ms=statistics.median(forward) / call.divide,
                    backward_ms=statistics.median(backward) / call.divide,
                    spread=spread(forward),
                )
            )
            advance()
    assert layer is not None
    rows_seen = [item.rows for item in measurements]
    pairs_seen = [item.pairs for item in measurements]
    return LayerProfile(
        kind=layer.kind,
        key=layer_key(layer),
        tp=1,
        forward=fit_times(rows_seen, pairs_seen, [item.forward_ms for item in measurements]),
        backward=fit_times(rows_seen, pairs_seen, [item.backward_ms for item in measurements]),
        measurements=tuple(measurements),
    )
