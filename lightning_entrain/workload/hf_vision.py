"""Vision towers and projectors from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload import blocks
from lightning_entrain.workload.layers import Attention, AttentionPattern, Axis, Layer
from lightning_entrain.workload.shapes import ModuleShape, ViewRule

Config = Mapping[str, Any]


def vision_shape(vision: Config, config: Config, family: str, llm_hidden: int) -> ModuleShape:
    """Shape of a vision tower with its projector.

    Args:
        vision: The tower's configuration.
        config: The whole model's, for the projector.
        family: The whole model's ``model_type``.
        llm_hidden: Width of the LLM.
    """
    tower = str(need(vision, "model_type", "vision_config"))
    if tower.startswith("qwen2_5"):
        return _qwen_vision(vision, llm_hidden)
    builder = _TOWERS.get(tower)
    if builder is None:
        raise ConfigError(
            f"vision_config.model_type is {tower!r}",
            limit=f"one of qwen2_5_vl, {', '.join(sorted(_TOWERS))}",
            remedy="describe the nearest of these towers with the model's own sizes",
        )
    prologue, block, num_layers, extra_rows, final_norm = builder(vision)
    hidden = int(vision["hidden_size"])
    layer = projector_layer(config, vision, family, llm_hidden, final_norm)
    return ModuleShape(
        name="encoder",
        prologue=(prologue,),
        blocks=(block,) * num_layers,
        epilogue=(layer,),
        hidden_size=hidden,
        output_size=llm_hidden,
        extra_rows_per_image=extra_rows,
    )


def _qwen_vision(vision: Config, llm_hidden: int) -> ModuleShape:
    hidden = int(need(vision, "hidden_size", "vision_config"))
    heads = int(need(vision, "num_heads", "vision_config"))
    patch = int(vision.get("patch_size", 14))
    merge = int(vision.get("spatial_merge_size", 2))
    window = int(vision.get("window_size", 112)) // patch
    full = tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))

    def block(index: int) -> Layer:
        attention = Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            pattern=AttentionPattern.FULL if index in full else AttentionPattern.WINDOW,
            window=0 if index in full else window,
        )
        return blocks.transformer_block(
            kind="encoder_block",
            hidden_size=hidden,
            attention=attention,
            mlp_size=int(vision["intermediate_size"]),
            gated=True,
            norm="rms",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            fused_qkv=True,
            chunked_attention=True,
        )

    values = int(vision.get("temporal_patch_size", 2)) * patch**2
    channels = int(vision.get("in_channels", vision.get("in_chans", 3)))
    merger = blocks.projector(
        input_size=hidden,
        sizes=(hidden * merge**2, int(vision.get("out_hidden_size") or llm_hidden)),
        bias=True,
        norm="rms",
        norm_axis=Axis.ROWS,
        merge=merge**2,
    )
    return ModuleShape(
        name="encoder",
        prologue=(blocks.patch_embed(patch_dim=channels * values, hidden_size=hidden, bias=False),),
        blocks=tuple(block(index) for index in range(int(vision["depth"]))),
        epilogue=(merger,),
        hidden_size=hidden,
        output_size=int(vision.get("out_hidden_size") or llm_hidden),
        window=window,
    )


_Tower = tuple[Layer, Layer, int, int, int]
"""Prologue, block, number of blocks, extra rows per image, width of the last norm."""


def _plain_tower(
    vision: Config,
    *,
    patch_bias: bool,
    class_rows: int,
    pre_norm: bool,
    activation: blocks.Activation,
    final_norm: bool,
    position_rows: int | None = None,
    extra_parameters: int = 0,
    **options: Any,
) -> _Tower:
    hidden = int(need(vision, "hidden_size", "vision_config"))
    heads = int(need(vision, "num_attention_heads", "vision_config"))
    patch = _side(vision["patch_size"])
    positions = (_side(vision["image_size"]) // patch) ** 2 + class_rows
    rows = positions if position_rows is None else position_rows
    prologue = blocks.patch_embed(
        patch_dim=int(vision.get("num_channels", 3)) * patch**2,
        hidden_size=hidden,
        bias=patch_bias,
        extra_parameters=hidden * (rows + class_rows) + extra_parameters,
        norm="layer" if pre_norm else None,
    )
    block = blocks.transformer_block(
        kind="encoder_block",
        hidden_size=hidden,
        attention=blocks.full_attention(heads, heads, hidden // heads),
        mlp_size=int(vision["intermediate_size"]),
        gated=False,
        rotary=False,
        activation=activation,
        **{"norm": "layer", "qkv_bias": True, "output_bias": True, "mlp_bias": True, **options},
    )
    count = int(vision["num_hidden_layers"])
    return prologue, block, count, class_rows, hidden if final_norm else 0


def _clip(vision: Config) -> _Tower:
    quick = vision.get("hidden_act", "quick_gelu") == "quick_gelu"
    return _plain_tower(
        vision,
        patch_bias=False,
        class_rows=1,
        pre_norm=True,
        activation="quick_gelu" if quick else "fused",
        final_norm=True,
    )


def _siglip(vision: Config) -> _Tower:
    return _plain_tower(
        vision, patch_bias=True, class_rows=0, pre_norm=False, activation="fused", final_norm=True
    )


def _internvit(vision: Config) -> _Tower:
    hidden = int(vision["hidden_size"])
    normed = bool(vision.get("use_qk_norm", False))
    positions = bool(vision.get("use_absolute_position_embeddings", True))
    return _plain_tower(
        vision,
        patch_bias=True,
        class_rows=1,
        pre_norm=False,
        activation="fused",
        final_norm=not vision.get("use_mean_pooling", True),
        position_rows=None if positions else 0,
        extra_parameters=hidden if vision.get("use_mask_token") else 0,
        norm="rms" if vision.get("norm_type") == "rms_norm" else "layer",
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm="rms" if normed else None,
        qk_norm_per_head=False,
        layer_scale=True,
    )


_TOWERS: dict[str, Callable[[Config], _Tower]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "smolvlm_vision": _siglip,
    "idefics3_vision": _siglip,
    "internvl_vision": _internvit,
}


def projector_layer(
    config: Config, vision: Config, family: str, llm_hidden: int, final_norm: int
) -> Layer:
    """The layer between a plain vision tower and the LLM, by model family.

    ``projector.kind`` overrides the family: ``mlp`` (LLaVA), ``pixel_shuffle_mlp`` (InternVL),
    ``pixel_shuffle_linear`` (SmolVLM), ``pool_linear`` (Gemma 3).
    """
    hidden = int(vision["hidden_size"])
    kind = (config.get("projector") or {}).get("kind") or _PROJECTORS.get(family, "mlp")
    common: dict[str, Any] = {"input_size": hidden, "final_norm_size": final_norm}
    if kind == "pixel_shuffle_mlp":
        merge = round(1 / float(config.get("downsample_ratio", 0.5))) ** 2
        return blocks.projector(
            sizes=(llm_hidden, llm_hidden), bias=True, norm="layer", merge=merge, **common
        )
    if kind == "pixel_shuffle_linear":
        merge = int(config.get("scale_factor", 2)) ** 2
        return blocks.projector(sizes=(llm_hidden,), bias=False, norm=None, merge=merge, **common)
    if kind == "pool_linear":
        return blocks.projector(
            sizes=(llm_hidden,), bias=False, norm="rms_unit", pooled=True, **common
        )
    if kind != "mlp":
        raise ConfigError(
            f"projector.kind is {kind!r}", limit=f"one of {set(_PROJECTORS.values())}"
        )
    return blocks.projector(
        sizes=(llm_hidden, llm_hidden),
        bias=bool(config.get("multimodal_projector_bias", True)),
        norm=None,
        extra_parameters=llm_hidden if family == "llava_onevision" else 0,
        **common,
    )


_PROJECTORS = {
    "llava": "mlp",
    "llava_onevision": "mlp",
    "internvl": "pixel_shuffle_mlp",
    "smolvlm": "pixel_shuffle_linear",
    "idefics3": "pixel_shuffle_linear",
    "gemma3": "pool_linear",
}


def view_rule(config: Config, vision: Config, family: str) -> ViewRule:
    """How the model turns images into patches; ``view_rule`` in the configuration overrides it."""
    given = dict(config.get("view_rule") or {})
    patch = _side(vision.get("patch_size", 14))
    if str(vision.get("model_type", "")).startswith("qwen2_5"):
        merge = int(vision.get("spatial_merge_size", 2))
        return ViewRule(**{"kind": "qwen", "patch_size": patch, "merge_size": merge, **given})
    size = _side(vision.get("image_size", 0))
    if family == "internvl":
        ratio = round(1 / float(config.get("downsample_ratio", 0.5)))
        defaults: dict[str, Any] = {"kind": "tiles", "merge_size": ratio, "max_tiles": 12}
    elif family in ("smolvlm", "idefics3"):
        merge = int(config.get("scale_factor", 2))
        defaults = {"kind": "tiles", "merge_size": merge, "longest_edge": 4 * size}
    elif family == "llava_onevision":
        defaults = {"kind": "tiles", "merge_size": 1, "max_tiles": 9}
    elif family == "gemma3":
        tokens = int(config.get("mm_tokens_per_image", 256))
        defaults = {"kind": "fixed", "merge_size": 1, "tokens_per_view": tokens}
    else:
        defaults = {"kind": "fixed", "merge_size": 1}
    return ViewRule(**{"patch_size": patch, "image_size": size, **defaults, **given})


def _side(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def need(config: Config, key: str, where: str) -> Any:
    """A value that must be there.

    Raises:
        ConfigError: Naming the key and the part that lacks it.
    """
    if config.get(key) is None:
        raise ConfigError(f"{where} has no {key}", limit="a complete Hugging Face configuration")
    return config[key]
