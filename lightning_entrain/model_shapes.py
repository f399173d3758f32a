"""The shape of a model that exists, for planning it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.blocks import projector
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.shapes import ModelShape
from lightning_entrain.workload.trained_flops import TrainedParts


def shape_of_model(model: Any, *, name: str = "") -> ModelShape:
    """Read the shape of an ``EntrainModel`` from its modules' Hugging Face configurations.

    Args:
        model: A model with ``encoder``, ``llm`` and maybe a ``projector`` of linear layers.
        name: Name for tables.

    Raises:
        ConfigError: If a module has no configuration, or is of a family that cannot be planned.
    """
    vision = {**_config(model.encoder, "encoder"), "model_type": "qwen2_5_vl"}
    shape = model_shape(
        {
            "vision_config": vision,
            "text_config": _config(model.llm, "llm"),
            "tie_word_embeddings": bool(model.llm.tied_parameters()),
        },
        name=name or type(model).__name__,
    )
    if model.projector is None:
        return shape
    weights = [p for p in model.projector.parameters() if p.dim() == 2]
    extra = projector(
        input_size=int(weights[0].shape[1]),
        sizes=tuple(int(weight.shape[0]) for weight in weights),
        bias=any(p.dim() == 1 for p in model.projector.parameters()),
        norm=None,
    )
    encoder = replace(
        shape.encoder,
        epilogue=(*shape.encoder.epilogue, extra),
        output_size=int(weights[-1].shape[0]),
    )
    return replace(shape, encoder=encoder)


def trained_parts(model: Any, shape: ModelShape) -> TrainedParts:
    """Which part of each layer's parameters is trained; read off a model that is not pruned.

    Args:
        model: An ``EntrainModel``.
        shape: Its shape.
    """
    found = []
    for module, layers in ((model.encoder, shape.encoder), (model.llm, shape.llm)):
        after = [_trained_part(module, module.epilogue_names())] * len(layers.epilogue)
        if module is model.encoder and model.projector is not None:
            after[-1] = _part(model.projector.parameters())
        found.append(
            (
                *[_trained_part(module, module.prologue_names())] * len(layers.prologue),
                *(_trained_part(module, (name,)) for name in module.layer_names()),
                *after,
            )
        )
    return TrainedParts(encoder=found[0], llm=found[1])


def _trained_part(module: Any, names: Iterable[str]) -> float:
    return _part(p for name in names for p in module.get_submodule(name).parameters())


def _part(parameters: Iterable[Any]) -> float:
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    trained = sum(size for size, requires_grad in sizes if requires_grad)
    return trained / max(sum(size for size, _ in sizes), 1)


def _config(module: Any, role: str) -> Mapping[str, Any]:
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ConfigError(
            f"The {role} is a {type(module).__name__} without a Hugging Face config",
            limit="a module whose shape can be read",
            remedy="give the layout by hand: encoder_stages and llm_stages",
        )
    record: Mapping[str, Any] = config.to_dict()
    return record
