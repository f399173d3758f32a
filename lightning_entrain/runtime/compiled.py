"""torch.compile for the layers of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.protocol import PassThrough, PipelineModule
from lightning_entrain.models.recompute import ATTENTION_NAMES, Recomputed

_NOTHING_TO_FUSE = (PassThrough, nn.Linear, nn.Embedding, nn.Identity)


class CompiledLayers:
    """Compiles the parts of a rank's layers whose shapes depend on the number of rows alone.

    Those are MLPs, norms, the encoder's merger, the projector: compiled once with a dynamic number
    of rows, for all layers of a kind, whatever the batch. Attention stays as it is: its graph would
    depend on how many samples and windows share a row, and differ in every microbatch.

    Args:
        model: The model with this rank's layers.
        backend: Of torch.compile.
    """

    def __init__(self, model: EntrainModel, backend: str | Callable[..., Any]) -> None:
        self._modules = list(_parts(model))
        for module in self._modules:
            own = module.__dict__.get("forward")
            if isinstance(own, Recomputed):  # compiled inside: what is recomputed is compiled, too
                own.inner = torch.compile(own.inner, backend=backend, dynamic=True)
            else:
                module.forward = torch.compile(module.forward, backend=backend, dynamic=True)

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            own = module.__dict__.get("forward")
            if isinstance(own, Recomputed):
                own.inner = type(module).forward.__get__(module)
            else:
                module.__dict__.pop("forward", None)
        self._modules = []


def _parts(model: EntrainModel) -> Iterator[nn.Module]:
    for module in (model.encoder, model.llm):
        yield from _of_module(module)
    if model.projector is not None and not isinstance(model.projector, _NOTHING_TO_FUSE):
        yield model.projector


def _of_module(module: PipelineModule) -> Iterator[nn.Module]:
    for name in module.layer_names():
        for child_name, child in module.get_submodule(name).named_children():
            if child_name not in ATTENTION_NAMES and not isinstance(child, _NOTHING_TO_FUSE):
                yield child
    for name in module.epilogue_names():
        part = module.get_submodule(name)
        if not isinstance(part, _NOTHING_TO_FUSE):
            yield part
