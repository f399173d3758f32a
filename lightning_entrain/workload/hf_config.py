"""Shapes from Hugging Face configurations, given as plain mappings (``config.to_dict()``).

No weights and no ``transformers`` import are needed. Vision towers: Qwen2.5-VL, CLIP, SigLIP,
SmolVLM, InternViT. Language models: Llama, Mistral, Qwen2, Qwen3, Gemma 3, and the mixtures
Mixtral, Qwen2-MoE and Qwen3-MoE.
"""

from __future__ import annotations

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload import blocks
from lightning_entrain.workload.hf_vision import Config, need, view_rule, vision_shape
from lightning_entrain.workload.layers import Attention, AttentionPattern, Layer
from lightning_entrain.workload.shapes import ModelShape, ModuleShape


def model_shape(config: Config, *, name: str = "") -> ModelShape:
    """Shape of a vision-language model.

    Args:
        config: Either a model's own configuration (``vision_config``, ``text_config`` and
            ``model_type``), or two free halves: ``vision_config``, ``text_config`` and
            ``projector`` (``{"kind": ..., ...}``, see
            :func:`lightning_entrain.workload.hf_vision.projector_layer`).
        name: Name for tables.

    Raises:
        ConfigError: If an architecture is unknown or a key is missing.
    """
    vision = need(config, "vision_config", "the model")
    text = config.get("text_config") or {
        key: value for key, value in config.items() if key != "vision_config"
    }
    if "hidden_size" not in text:
        raise ConfigError("The model has no text_config", limit="vision_config and text_config")
    for part, record in (("vision_config", vision), ("text_config", text)):
        check_sizes(part, record)
    llm = llm_shape(text, tied=_tied(config, text))
    family = str(config.get("model_type", ""))
    encoder = vision_shape(vision, config, family, llm.hidden_size)
    return ModelShape(
        name=name or family,
        encoder=encoder,
        llm=llm,
        view_rule=view_rule(config, vision, family),
        source=dict(config),
    )


_SIZES = (
    "depth",
    "hidden_size",
    "embed_dim",
    "num_hidden_layers",
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "image_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "in_channels",
    "in_chans",
    "out_hidden_size",
)
"""What counts or measures something, in any of the architectures; null leaves it to a default."""


def check_sizes(part: str, record: Config) -> None:
    """Check that whatever counts or measures something is a whole number of at least 1.

    Args:
        part: Name of the configuration, for messages.
        record: The configuration.

    Raises:
        ConfigError: For the first that is not.
    """
    for name in _SIZES:
        value = record.get(name)
        for number in value if isinstance(value, list | tuple) else (value,):
            whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and (not whole or number < 1):
                raise ConfigError(
                    f"model.{part}.{name} is {value!r}",
                    limit="a whole number of at least 1",
                    remedy=f"correct model.{part}.{name}",
                )


def _tied(config: Config, text: Config) -> bool:
    """The outer flag decides where the whole model has one, else the text model's."""
    for record in (config, text):
        if record.get("tie_word_embeddings") is not None:
            return bool(record["tie_word_embeddings"])
    return str(text.get("model_type", "")).startswith("gemma")


def llm_shape(text: Config, *, tied: bool | None = None) -> ModuleShape:
    """Shape of a decoder.

    Args:
        text: Its configuration.
        tied: Whether embedding and head are one parameter; None reads ``tie_word_embeddings``.
    """
    family = str(need(text, "model_type", "text_config"))
    if family not in _DECODERS:
        raise ConfigError(
            f"text_config.model_type is {family!r}",
            limit=f"one of {', '.join(sorted(_DECODERS))}",
            remedy="describe the nearest of these families with the model's own sizes",
        )
    hidden = int(need(text, "hidden_size", "text_config"))
    vocab = int(need(text, "vocab_size", "text_config"))
    norm: blocks.Norm = "rms_unit" if family.startswith("gemma") else "rms"
    layers = tuple(
        _decoder_block(text, family, index, norm)
        for index in range(int(need(text, "num_hidden_layers", "text_config")))
    )
    if tied is None:
        tied = bool(text.get("tie_word_embeddings", family.startswith("gemma")))
    sliding = any(_pattern(text, i) is AttentionPattern.SLIDING for i in range(len(layers)))
    return ModuleShape(
        name="llm",
        prologue=(blocks.embedding(vocab_size=vocab, hidden_size=hidden),),
        blocks=layers,
        epilogue=(blocks.head(vocab_size=vocab, hidden_size=hidden, norm=norm, tied=tied),),
        hidden_size=hidden,
        output_size=vocab,
        window=int(text.get("sliding_window") or 0) if sliding else 0,
    )


_QKV_BIASED = frozenset({"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe"})
_QK_NORMED = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_MOE = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})
_DECODERS = _QKV_BIASED | _QK_NORMED | _MOE | {"llama", "mistral", "gemma", "smollm3"}


def _pattern(text: Config, index: int) -> AttentionPattern:
    kinds = text.get("layer_types")
    if kinds:
        sliding = kinds[index] == "sliding_attention"
    elif str(text.get("model_type", "")).startswith("gemma3"):
        sliding = (index + 1) % int(text.get("sliding_window_pattern", 6)) != 0
    else:
        sliding = bool(text.get("use_sliding_window", False))
    return AttentionPattern.SLIDING if sliding else AttentionPattern.CAUSAL


def _decoder_block(text: Config, family: str, index: int, norm: blocks.Norm) -> Layer:
    hidden = int(text["hidden_size"])
    heads = int(need(text, "num_attention_heads", "text_config"))
    head_dim = int(text.get("head_dim") or hidden // heads)
    pattern = _pattern(text, index)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        pattern=pattern,
        window=int(text.get("sliding_window") or 0) if pattern is AttentionPattern.SLIDING else 0,
    )
    biased = bool(text.get("attention_bias", False))
    moe = _experts(text, family, index)
    return blocks.transformer_block(
        kind="decoder_block",
        hidden_size=hidden,
        attention=attention,
        mlp_size=moe.get("mlp_size", 0) or int(need(text, "intermediate_size", "text_config")),
        gated=True,
        norm=norm,
        qkv_bias=biased or family in _QKV_BIASED,
        output_bias=biased,
        mlp_bias=bool(text.get("mlp_bias", False)),
        sandwich_norms=family.startswith("gemma3"),
        qk_norm=norm if family in _QK_NORMED else None,
        num_experts=moe.get("num_experts", 0),
        experts_per_token=moe.get("experts_per_token", 0),
        shared_mlp_size=moe.get("shared_mlp_size", 0),
    )


def _experts(text: Config, family: str, index: int) -> dict[str, int]:
    if family not in _MOE:
        return {}
    if family == "mixtral":
        return {
            "num_experts": int(text["num_local_experts"]),
            "experts_per_token": int(text["num_experts_per_tok"]),
        }
    dense = index in (text.get("mlp_only_layers") or ())
    if dense or (index + 1) % int(text.get("decoder_sparse_step") or 1) != 0:
        return {}
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    return {
        "num_experts": int(
            text.get("num_experts") or need(text, "num_local_experts", "text_config")
        ),
        "experts_per_token": int(need(text, "num_experts_per_tok", "text_config")),
        "mlp_size": int(text["moe_intermediate_size"]),
        "shared_mlp_size": shared if family == "qwen2_moe" else 0,
    }
