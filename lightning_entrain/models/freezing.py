"""Choosing what is trained: encoder, projector, LLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import nn

from lightning_entrain.errors import ConfigError

if TYPE_CHECKING:
    from lightning_entrain.models.entrain_model import EntrainModel

PARTS = ("encoder", "projector", "llm")
"""What can be frozen. The projector is the module between encoder and LLM: the model's own
projector, or else the encoder's epilogue (the merger of Qwen2.5-VL)."""


def freeze(model: EntrainModel, parts: Collection[str]) -> None:
    """Train everything but these parts; to be called on the whole model, before a fit.

    Stages before the first trained parameter then run forward alone: no backward, no gradient
    messages, no activations kept. Frozen layers behind it pass gradients on without computing any
    for their weights.

    Args:
        model: The model.
        parts: Some of ``encoder``, ``projector``, ``llm``; ``("encoder", "llm")`` trains the
            projector alone.

    Raises:
        ConfigError: If a part is unknown, or nothing would be trained.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ConfigError(f"freeze has {unknown[0]!r}", limit=f"some of {', '.join(PARTS)}")
    if set(parts) == set(PARTS):
        raise ConfigError("freeze has all parts", limit="something is trained")
    for part in parts:
        for module in modules_of(model, part):
            module.requires_grad_(False)


def modules_of(model: EntrainModel, part: str) -> Iterator[nn.Module]:
    """The modules of ``encoder``, ``projector`` or ``llm``."""
    encoder = model.encoder
    if part == "llm":
        yield model.llm
    elif part == "projector" and model.projector is not None:
        yield model.projector
    else:
        names = encoder.epilogue_names()
        if part == "encoder":
            own = () if model.projector is None else names
            names = (*encoder.prologue_names(), *encoder.layer_names(), *own)
        for name in names:
            yield encoder.get_submodule(name)
