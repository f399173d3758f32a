"""Small Hugging Face layers and the shapes that should describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.layers import AttentionPattern, Layer
from lightning_entrain.workload.shapes import Load, ModelShape

LLM = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
TOWER = {
    "hidden_size": 128,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}
QWEN = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 288,
    "num_heads": 4,
    "out_hidden_size": 96,
    "fullatt_block_indexes": [3],
}
ROWS = 64


@dataclass
class Case:
    """A runnable layer, its inputs, and what describes it."""

    layer: Layer
    load: Load
    module: nn.Module
    run: Callable[[], Tensor]
    shared: tuple[Tensor, ...] = ()


def causal_load(rows: int) -> Load:
    pairs = {AttentionPattern.CAUSAL: np.array([rows**2.0])}
    pairs[AttentionPattern.SLIDING] = np.array([rows**2.0])
    return Load(rows=np.array([float(rows)]), merged=np.array([float(rows)]), pairs=pairs)


def image_load(images: int, rows: int, merged: int, window: int = 0) -> Load:
    pairs = {
        AttentionPattern.FULL: np.array([images * rows**2.0]),
        AttentionPattern.WINDOW: np.array([float(images * rows * window)]),
    }
    return Load(rows=np.array([images * rows]), merged=np.array([images * merged]), pairs=pairs)


def random(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def decoder(family: str, dtype: torch.dtype) -> tuple[Any, ModelShape]:
    config = transformers.AutoConfig.for_model(family, **LLM)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    vision = {"model_type": "siglip_vision_model", **TOWER}
    return model, model_shape({"vision_config": vision, "text_config": config.to_dict()})


def decoder_block(family: str, dtype: torch.dtype) -> Case:
    model, shape = decoder(family, dtype)
    hidden = random(1, ROWS, 128, dtype=dtype)
    positions = torch.arange(ROWS)[None]
    extra = {"layer_type": "full_attention"} if family == "gemma3_text" else {}
    index = 5 if family == "gemma3_text" else 1  # Gemma's first global layer
    if extra:
        cos, sin = model.model.rotary_emb(hidden, positions, "full_attention")
    else:
        cos, sin = model.model.rotary_emb(hidden, positions)
    block = model.model.layers[index]

    def run() -> Tensor:
        result = block(hidden, position_embeddings=(cos, sin), attention_mask=None)
        return result[0] if isinstance(result, tuple) else result

    return Case(shape.llm.blocks[index], causal_load(ROWS), block, run, (cos, sin))


def llm_embedding(dtype: torch.dtype) -> Case:
    model, shape = decoder("llama", dtype)
    ids = torch.randint(0, 1000, (ROWS,))
    table = model.model.embed_tokens
    return Case(shape.llm.prologue[0], causal_load(ROWS), table, lambda: table(ids))


def llm_head(dtype: torch.dtype) -> Case:
    model, shape = decoder("llama", dtype)
    hidden = random(ROWS, 128, dtype=dtype)
    labels = torch.randint(0, 1000, (ROWS,))
    module = nn.Sequential(model.model.norm, model.lm_head)
    return Case(
        shape.llm.epilogue[0],
        causal_load(ROWS),
        module,
        lambda: F.cross_entropy(module(hidden).float(), labels),
    )


def qwen_vision(dtype: torch.dtype) -> tuple[Any, ModelShape]:
    model = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(
        qwen.Qwen2_5_VLVisionConfig(**QWEN, attn_implementation="sdpa"), dtype=dtype
    )
    text = {"model_type": "llama", **LLM, "hidden_size": 96}
    return model, model_shape(
        {"vision_config": {"model_type": "qwen2_5_vl", **QWEN}, "text_config": text}
    )


def qwen_block(index: int, dtype: torch.dtype) -> Case:
    """One image of 16 x 16 patches: 4 windows of 64."""
    model, shape = qwen_vision(dtype)
    hidden = random(256, 128, dtype=dtype)
    cos, sin = torch.randn(256, 32), torch.randn(256, 32)
    step = 256 if index == 3 else 64
    lengths = torch.arange(0, 257, step, dtype=torch.int32)
    block = model.blocks[index]
    return Case(
        shape.encoder.blocks[index],
        image_load(1, 256, 64, window=64),
        block,
        lambda: block(hidden, cu_seqlens=lengths, position_embeddings=(cos, sin)),
        (cos, sin),
    )


def qwen_patches(dtype: torch.dtype) -> Case:
    model, shape = qwen_vision(dtype)
    pixels = random(256, 1176, dtype=dtype, grad=False)
    layer = model.patch_embed
    return Case(shape.encoder.prologue[0], image_load(1, 256, 64), layer, lambda: layer(pixels))


def qwen_merger(dtype: torch.dtype) -> Case:
    model, shape = qwen_vision(dtype)
    hidden = random(256, 128, dtype=dtype)
    layer = model.merger
    return Case(shape.encoder.epilogue[0], image_load(1, 256, 64), layer, lambda: layer(hidden))


FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("llava", {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}, {}),
    "siglip": (
        "gemma3",
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 16},
    ),
    "smolvlm": ("smolvlm", {"model_type": "smolvlm_vision"}, {"scale_factor": 2}),
    "internvl": (
        "internvl",
        {"model_type": "internvl_vision", "attention_bias": True, "norm_type": "layer_norm"},
        {"downsample_ratio": 0.5},
    ),
}
NUM_IMAGES, PATCHES = 2, 64


def plain_model(name: str, dtype: torch.dtype) -> tuple[Any, ModelShape, int]:
    family, vision, extra = FAMILIES[name]
    text = {"model_type": "gemma3_text" if family == "gemma3" else "llama", **LLM}
    config = {
        "model_type": family,
        "vision_config": {**vision, **TOWER},
        "text_config": text,
        **extra,
    }
    hf = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForImageTextToText.from_config(hf, dtype=dtype)
    shape = model_shape(config)
    return model.model, shape, PATCHES + shape.encoder.extra_rows_per_image


def tower_of(model: Any) -> Any:
    return getattr(model, "vision_tower", None) or model.vision_model


def plain_load(shape: ModelShape, rows: int) -> Load:
    layer = shape.encoder.epilogue[0]
    merged = PATCHES * 128 // layer.linears[0].in_features
    if shape.name == "gemma3":
        merged = 16
    return image_load(NUM_IMAGES, rows, merged)


def plain_block(name: str, dtype: torch.dtype) -> Case:
    model, shape, rows = plain_model(name, dtype)
    tower = tower_of(model)
    block = (tower.encoder.layer if name == "internvl" else tower.encoder.layers)[0]
    hidden = random(NUM_IMAGES, rows, 128, dtype=dtype)

    def run() -> Tensor:
        result = block(hidden) if name == "internvl" else block(hidden, attention_mask=None)
        return result[0] if isinstance(result, tuple) else result

    return Case(shape.encoder.blocks[0], plain_load(shape, rows), block, run)


def plain_patches(name: str, dtype: torch.dtype) -> Case:
    model, shape, rows = plain_model(name, dtype)
    tower = tower_of(model)
    pixels = random(NUM_IMAGES, 3, 112, 112, dtype=dtype, grad=False)
    module = nn.ModuleList([tower.embeddings])
    norm = getattr(tower, "pre_layrnorm", None)
    if norm is not None:
        module.append(norm)

    def run() -> Tensor:
        if name == "smolvlm":
            mask = torch.ones(NUM_IMAGES, 8, 8, dtype=torch.bool)
            return tower.embeddings(pixel_values=pixels, patch_attention_mask=mask)
        result = tower.embeddings(pixels)
        result = result[0] if isinstance(result, tuple) else result
        return result if norm is None else norm(result)

    return Case(shape.encoder.prologue[0], plain_load(shape, rows), module, run)


def plain_projector(name: str, dtype: torch.dtype) -> Case:
    model, shape, rows = plain_model(name, dtype)
    tower = tower_of(model)
    layer = getattr(model, "multi_modal_projector", None) or model.connector
    norm = getattr(tower, "post_layernorm", None)
    modules = nn.ModuleList([layer] if norm is None else [layer, norm])
    hidden = random(NUM_IMAGES, rows, 128, dtype=dtype)

    def run() -> Tensor:
        features = hidden if norm is None else norm(hidden)
        if rows > PATCHES:
            features = features[:, 1:]
        if name == "internvl":
            features = model.pixel_shuffle(
                features.reshape(NUM_IMAGES, 8, 8, 128), scale_factor=0.5
            )
            features = features.reshape(NUM_IMAGES, 16, 512)
        return layer(features)

    return Case(shape.encoder.epilogue[0], plain_load(shape, rows), modules, run)


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "llama block": lambda dtype: decoder_block("llama", dtype),
    "qwen2 block": lambda dtype: decoder_block("qwen2", dtype),
    "qwen3 block": lambda dtype: decoder_block("qwen3", dtype),
    "gemma3 block": lambda dtype: decoder_block("gemma3_text", dtype),
    "embedding": llm_embedding,
    "head": llm_head,
    "qwen window block": lambda dtype: qwen_block(0, dtype),
    "qwen full block": lambda dtype: qwen_block(3, dtype),
    "qwen patch embed": qwen_patches,
    "qwen merger": qwen_merger,
    **{f"{name} block": (lambda dtype, n=name: plain_block(n, dtype)) for name in FAMILIES},
    **{f"{name} patch embed": (lambda dtype, n=name: plain_patches(n, dtype)) for name in FAMILIES},
    **{f"{name} projector": (lambda dtype, n=name: plain_projector(n, dtype)) for name in FAMILIES},
}
