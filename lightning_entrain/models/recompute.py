"""Activation checkpointing: run parts of a layer again in backward instead of keeping them.

Entrain (section 5, arXiv 2605.27918) needs memory for eager forwards; this is one way to get it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.protocol import PipelineModule

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""What layers call their attention."""

_MLP = ("mlp", "feed_forward", "ffn")
_EVERY = re.compile(r"every_([1-9]\d*)")

ContextMaker = Callable[[], AbstractContextManager[Any]]

CONTEXTS: list[Callable[[], ContextMaker]] = []
"""Called in forward; what each returns makes the context that the recomputation runs in."""


class Recomputed:
    """Stands in for a module's ``forward``; keeps its inputs alone, and names stay as they are.

    Attributes:
        inner: The forward that is run, and run again.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward; under autograd its intermediate results are dropped."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        again = [capture() for capture in CONTEXTS]
        # Nothing here draws from torch's generators (dropout counts), so they need no copies.
        return checkpoint(
            self.inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _Entered(again)),
            **kwargs,
        )


class _Entered:
    """Contexts as they were in forward, entered together; as often as wanted."""

    def __init__(self, makers: list[ContextMaker]) -> None:
        self._makers = makers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for make in self._makers:
            self._stack.enter_context(make())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def recompute_layers(module: PipelineModule, what: str) -> None:
    """Choose what of a module's layers is recomputed; the last call counts.

    A layer's forward then runs once more, in its backward (B, or I where B is split), and only the
    inputs of what is recomputed are kept from F on. Results do not change.

    Args:
        module: Encoder or LLM.
        what: ``none``; ``full``: whole layers; ``every_N``: every N-th layer, whole;
            ``attention`` or ``mlp``: that part of each layer.

    Raises:
        ConfigError: If the choice is unknown, or the layers have no such part.
    """
    every = _EVERY.fullmatch(what)
    if every is None and what not in ("none", "full", "attention", "mlp"):
        raise ConfigError(f"recompute is {what!r}", limit="none, full, every_N, attention or mlp")
    for part in _parts(module):
        if isinstance(part.__dict__.get("forward"), Recomputed):
            del part.__dict__["forward"]
    if what == "none":
        return
    step = int(every[1]) if every is not None else 1
    for name in module.layer_names()[::step]:
        layer = module.get_submodule(name)
        if what in ("attention", "mlp"):
            layer = _child(layer, name, ATTENTION_NAMES if what == "attention" else _MLP)
        layer.forward = Recomputed(layer.forward)


def recomputed_share(module: PipelineModule) -> float:
    """Part of a module's layers (by parameters) whose forward runs twice, 0 to 1."""
    layers = [module.get_submodule(name) for name in module.layer_names()]
    total = sum(p.numel() for layer in layers for p in layer.parameters())
    again = sum(
        p.numel()
        for part in _parts(module)
        if isinstance(part.__dict__.get("forward"), Recomputed)
        for p in part.parameters()
    )
    return again / max(total, 1)


def _parts(module: PipelineModule) -> Iterator[nn.Module]:
    for name in module.layer_names():
        layer = module.get_submodule(name)
        yield layer
        yield from layer.children()


def _child(layer: nn.Module, name: str, names: tuple[str, ...]) -> nn.Module:
    for child_name, child in layer.named_children():
        if child_name in names:
            return child
    raise ConfigError(
        f"Layer {name} ({type(layer).__name__}) has none of {', '.join(names)}",
        limit="a part of that name to recompute",
        remedy="recompute whole layers: full or every_N",
    )
