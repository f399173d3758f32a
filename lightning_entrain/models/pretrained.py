"""Models with pretrained weights, and back to Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.utils import logging

from lightning_entrain.errors import CheckpointError, ConfigError
from lightning_entrain.models.decoder import DecoderLlm
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.lora import merged_state
from lightning_entrain.models.qwen_vision import QwenVisionEncoder
from lightning_entrain.models.tiny import assemble, seeded

PROJECTOR_FILE = "projector.safetensors"


def vlm_from_pretrained(
    vision_path: str,
    text_path: str,
    *,
    image_token_id: int,
    projector: str = "auto",
    projector_path: str | None = None,
    dtype: str = "float32",
    attention: str | None = None,
    seed: int = 0,
    encoder_recompute: str = "none",
    llm_recompute: str = "none",
) -> EntrainModel:
    """A model from Hugging Face checkpoints.

    Args:
        vision_path: Folder or hub name of a Qwen2.5-VL checkpoint, whole or vision tower alone. Of
            a whole one only the vision tower's weights are read.
        text_path: Folder or hub name of a decoder.
        image_token_id: Token id of the image placeholders; the data's tokenizer defines it.
        projector: ``auto`` adds a new MLP if the vision tower's output has not the LLM's hidden
            size, ``mlp`` always does, ``none`` never.
        projector_path: Weights of the projector, as :func:`export_pretrained` writes them.
        dtype: Parameters' dtype, by name.
        attention: Hugging Face attention implementation; its default if None.
        seed: Seeds what is not in the checkpoints (a new projector).
        encoder_recompute: What of the encoder's layers runs again in backward, to save memory:
            ``none``, ``full``, ``every_N``, ``attention`` or ``mlp``.
        llm_recompute: The same for the LLM.

    Raises:
        ConfigError: If an option cannot be used.
        CheckpointError: If a checkpoint lacks weights.
    """
    options: dict[str, Any] = {"dtype": _dtype(dtype)}
    if attention is not None:
        options["attn_implementation"] = attention
    with seeded(seed):
        vision = _load_vision(vision_path, options)
        text, report = AutoModelForCausalLM.from_pretrained(
            text_path, output_loading_info=True, **options
        )
        _check_complete(text_path, report)
        # from_pretrained returns models in eval mode
        model = assemble(
            vision.train(),
            text.train(),
            image_token_id=image_token_id,
            projector=projector,
            encoder_recompute=encoder_recompute,
            llm_recompute=llm_recompute,
        )
    if model.projector is not None:
        model.projector.to(options["dtype"])
    if projector_path is not None:
        _load_projector(model, projector_path)
    return model


def export_pretrained(model: EntrainModel, folder: str | Path) -> None:
    """Write both modules as Hugging Face checkpoints.

    Writes ``vision/`` and ``llm/`` with ``save_pretrained``, and :data:`PROJECTOR_FILE` if the
    model has a projector. :func:`vlm_from_pretrained` reads them back. Adapters become part of the
    weights; :func:`save_adapters` writes them alone.

    Args:
        model: The whole model (not one pruned to a stage).
        folder: Where to write; made if missing.
    """
    encoder, llm = model.encoder, model.llm
    if not isinstance(encoder, QwenVisionEncoder) or not isinstance(llm, DecoderLlm):
        raise ConfigError(
            f"The model has a {type(encoder).__name__} and a {type(llm).__name__}",
            limit="export_pretrained writes Hugging Face modules",
        )
    folder = Path(folder)
    for name, module in (("vision", encoder.hugging_face_model), ("llm", llm.hugging_face_model)):
        if any(True for _ in getattr(module, "peft_config", ())):
            module.save_pretrained(folder / name, state_dict=merged_state(module))
        else:
            module.save_pretrained(folder / name)
    if model.projector is not None:
        state = {k: v.detach().contiguous() for k, v in model.projector.state_dict().items()}
        save_file(state, str(folder / PROJECTOR_FILE))


def _load_vision(path: str, options: dict[str, Any]) -> Any:
    config = AutoConfig.from_pretrained(path)
    kind = config.model_type
    if kind == "qwen2_5_vl":
        # A rename that drops the prefix makes the tower's names match; the rest is never read.
        options = {**options, "key_mapping": {r"^(model\.)?visual\.": ""}}
        config = config.vision_config
    elif kind != "qwen2_5_vl_vision":
        raise ConfigError(
            f"vision_path {path!r} holds a model of type {kind!r}",
            limit="qwen2_5_vl or qwen2_5_vl_vision",
        )
    with _no_report_of_unused_weights():
        vision, report = Qwen2_5_VisionTransformerPretrainedModel.from_pretrained(
            path, config=config, output_loading_info=True, **options
        )
    _check_complete(path, report)
    return vision


@contextmanager
def _no_report_of_unused_weights() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _check_complete(path: str, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"The checkpoint {path!r} lacks {len(missing)} weights, such as {missing[0]}",
            limit="every weight of the model",
            remedy="check that the path holds the model its config describes",
        )


def _load_projector(model: EntrainModel, path: str) -> None:
    if model.projector is None:
        raise ConfigError(
            f"projector_path is {path!r}, but the model has no projector",
            remedy="set projector=mlp",
        )
    try:
        model.projector.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"projector_path {path!r} cannot be loaded: {error}",
            limit="weights of an MLP projector between these two modules",
        ) from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype is {name!r}", limit="float32, bfloat16 or float16")
    return found
