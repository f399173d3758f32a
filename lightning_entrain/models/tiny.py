"""Vision-language models built from Hugging Face configs; no download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.decoder import DecoderLlm
from lightning_entrain.models.entrain_model import EntrainModel, num_correct
from lightning_entrain.models.projector import MlpProjector
from lightning_entrain.models.qwen_vision import QwenVisionEncoder
from lightning_entrain.models.recompute import recompute_layers


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's CPU generator under ``seed``, and leave its state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def vlm_from_configs(
    vision_config: Mapping[str, Any] | Qwen2_5_VLVisionConfig,
    text_config: Mapping[str, Any] | Any,
    *,
    image_token_id: int,
    seed: int = 0,
    projector: str = "auto",
    encoder_recompute: str = "none",
    llm_recompute: str = "none",
) -> EntrainModel:
    """A randomly initialised model of any size.

    Args:
        vision_config: Config of a Qwen2.5-VL vision transformer, or its fields.
        text_config: Config of a decoder, or its fields; ``model_type`` names the family
            (``llama`` by default).
        image_token_id: Token id of the image placeholders; the data's tokenizer defines it.
        seed: Same seed, same weights. Torch's global generator is left as it was.
        projector: ``auto`` adds an MLP if the vision transformer's ``out_hidden_size`` is not the
            LLM's hidden size, ``mlp`` always does, ``none`` never.
        encoder_recompute: What of the encoder's layers runs again in backward, to save memory:
            ``none``, ``full``, ``every_N``, ``attention`` or ``mlp``.
        llm_recompute: The same for the LLM.

    Raises:
        ConfigError: If an option cannot be used.
    """
    if isinstance(vision_config, Mapping):
        vision_config = Qwen2_5_VLVisionConfig(**_plain(vision_config))
    if isinstance(text_config, Mapping):
        fields = _plain(text_config)
        text_config = AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)
    with seeded(seed):
        vision = Qwen2_5_VisionTransformerPretrainedModel._from_config(vision_config)
        text = AutoModelForCausalLM.from_config(text_config)
        return assemble(
            vision,
            text,
            image_token_id=image_token_id,
            projector=projector,
            encoder_recompute=encoder_recompute,
            llm_recompute=llm_recompute,
        )


def assemble(
    vision: Any,
    text: Any,
    *,
    image_token_id: int,
    projector: str = "auto",
    encoder_recompute: str = "none",
    llm_recompute: str = "none",
) -> EntrainModel:
    """Join two Hugging Face models; arguments as of :func:`vlm_from_configs`.

    Raises:
        ConfigError: If an option cannot be used.
    """
    if projector not in ("auto", "mlp", "none"):
        raise ConfigError(f"projector is {projector!r}", limit="auto, mlp or none")
    encoder = QwenVisionEncoder(vision)
    llm = DecoderLlm(text, image_token_id=image_token_id)
    recompute_layers(encoder, encoder_recompute)
    recompute_layers(llm, llm_recompute)
    needed = projector == "mlp" or (projector == "auto" and encoder.output_size != llm.hidden_size)
    return EntrainModel(
        encoder,
        llm,
        MlpProjector(encoder.output_size, llm.hidden_size) if needed else None,
        scalars={"num_correct": num_correct},
    )


def tiny_vlm(
    vocab_size: int = 2048,
    image_token_id: int = 0,
    *,
    encoder_layers: int = 4,
    encoder_hidden_size: int = 128,
    encoder_intermediate_size: int = 344,
    encoder_heads: int = 4,
    full_attention_every: int = 2,
    llm_layers: int = 4,
    llm_hidden_size: int = 192,
    llm_intermediate_size: int = 512,
    llm_heads: int = 6,
    llm_key_value_heads: int = 2,
    patch_size: int = 14,
    window_size: int = 112,
    max_position_embeddings: int = 32768,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    encoder_recompute: str = "none",
    llm_recompute: str = "none",
) -> EntrainModel:
    """A small Qwen2.5 vision transformer with a small Llama; 3.7 M parameters by default.

    Args:
        vocab_size: Token ids, special tokens included.
        image_token_id: Token id of the image placeholders; 0 in this package's tokenizers.
        encoder_layers: Layers of the vision transformer.
        encoder_hidden_size: Its columns.
        encoder_intermediate_size: Its MLP's columns.
        encoder_heads: Its attention heads; columns per head must be a multiple of 4.
        full_attention_every: Each so many-th layer attends to the whole image, the others to
            windows.
        llm_layers: Layers of the decoder.
        llm_hidden_size: Its columns.
        llm_intermediate_size: Its MLP's columns.
        llm_heads: Its attention heads; columns per head must be even.
        llm_key_value_heads: Its key and value heads.
        patch_size: Side of a patch in pixels.
        window_size: Side of an attention window in pixels.
        max_position_embeddings: Longest sample in tokens.
        tie_word_embeddings: Whether embedding and head are one parameter.
        seed: Same seed, same weights. Torch's global generator is left as it was.
        encoder_recompute: What of the encoder's layers runs again in backward, to save memory:
            ``none``, ``full``, ``every_N``, ``attention`` or ``mlp``.
        llm_recompute: The same for the LLM.

    Raises:
        ConfigError: If sizes do not fit together.
    """
    _check_heads("encoder", encoder_hidden_size, encoder_heads, multiple=4)
    _check_heads("llm", llm_hidden_size, llm_heads, multiple=2)
    if llm_key_value_heads < 1 or llm_heads % llm_key_value_heads:
        raise ConfigError(
            f"llm_key_value_heads is {llm_key_value_heads}",
            limit=f"a divisor of llm_heads, {llm_heads}",
        )
    for name, value in (
        ("encoder_layers", encoder_layers),
        ("llm_layers", llm_layers),
        ("full_attention_every", full_attention_every),
        ("vocab_size", vocab_size),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}", limit="at least 1")
    vision = Qwen2_5_VLVisionConfig(
        depth=encoder_layers,
        hidden_size=encoder_hidden_size,
        intermediate_size=encoder_intermediate_size,
        num_heads=encoder_heads,
        out_hidden_size=llm_hidden_size,
        patch_size=patch_size,
        window_size=window_size,
        fullatt_block_indexes=list(
            range(full_attention_every - 1, encoder_layers, full_attention_every)
        ),
    )
    text = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=llm_hidden_size,
        intermediate_size=llm_intermediate_size,
        num_hidden_layers=llm_layers,
        num_attention_heads=llm_heads,
        num_key_value_heads=llm_key_value_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    return vlm_from_configs(
        vision,
        text,
        image_token_id=image_token_id,
        seed=seed,
        encoder_recompute=encoder_recompute,
        llm_recompute=llm_recompute,
    )


def nano_vlm(
    vocab_size: int = 260,
    image_token_id: int = 0,
    *,
    encoder_layers: int = 3,
    llm_layers: int = 3,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    encoder_recompute: str = "none",
    llm_recompute: str = "none",
) -> EntrainModel:
    """:func:`tiny_vlm` with about 60,000 parameters, for tests; arguments as there."""
    return tiny_vlm(
        vocab_size,
        image_token_id,
        encoder_layers=encoder_layers,
        encoder_hidden_size=16,
        encoder_intermediate_size=32,
        encoder_heads=2,
        llm_layers=llm_layers,
        llm_hidden_size=24,
        llm_intermediate_size=48,
        llm_heads=2,
        llm_key_value_heads=1,
        tie_word_embeddings=tie_word_embeddings,
        seed=seed,
        encoder_recompute=encoder_recompute,
        llm_recompute=llm_recompute,
    )


def _check_heads(name: str, hidden_size: int, num_heads: int, *, multiple: int) -> None:
    if num_heads < 1 or hidden_size % num_heads or hidden_size // num_heads % multiple:
        raise ConfigError(
            f"{name}_hidden_size is {hidden_size} with {num_heads} heads",
            limit=f"a whole number of columns per head, and a multiple of {multiple}",
            remedy=f"set {name}_hidden_size to a multiple of {multiple} x {name}_heads",
        )


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Plain dicts and lists of what may be an OmegaConf mapping."""
    return {key: _plain_value(value) for key, value in fields.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [_plain_value(item) for item in value]
    return value
