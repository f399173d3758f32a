"""Which names a rank owns, and removing the rest in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.protocol import PassThrough, PipelineModule

if TYPE_CHECKING:
    from lightning_entrain.models.entrain_model import EntrainModel

LayerRange = tuple[int, int]
"""Layers [start, stop) of a module."""


def owned_names(
    model: EntrainModel, encoder_ranges: Sequence[LayerRange], llm_ranges: Sequence[LayerRange]
) -> set[str]:
    """State-dict names of ``model`` that these stages hold.

    Ranges that cut the layers of both modules into stages cut the names too: each name belongs to
    exactly one stage. The prologue goes with layer 0, the epilogue with the last layer, the
    projector with the encoder's last layer. Two names of a tied parameter are counted as two.

    Args:
        model: The whole model, not yet pruned.
        encoder_ranges: Encoder layers [start, stop) of each stage held.
        llm_ranges: LLM layers [start, stop) of each stage held.
    """
    prefixes = tuple(f"{name}." for name in _kept_modules(model, encoder_ranges, llm_ranges))
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def prune_to_stages(
    model: EntrainModel, encoder_ranges: Sequence[LayerRange], llm_ranges: Sequence[LayerRange]
) -> None:
    """Replace every module that these stages do not run by a :class:`PassThrough`, in place.

    What stays keeps its name. Rotary tables and other state outside checkpoints stay everywhere.

    Args:
        model: The whole model.
        encoder_ranges: Encoder layers [start, stop) of each stage held.
        llm_ranges: LLM layers [start, stop) of each stage held.
    """
    kept = set(_kept_modules(model, encoder_ranges, llm_ranges))
    for name in _kept_modules(model, [(0, model.encoder.num_layers)], [(0, model.llm.num_layers)]):
        if name not in kept:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = PassThrough()


def check_names(prefix: str, module: PipelineModule) -> None:
    """Check that a module's names fit together and cover its state.

    Raises:
        ConfigError: If a name does not exist or lies within another, if there are not
            ``num_layers`` layers, or if a parameter or persistent buffer lies in none of them.
    """
    layers = module.layer_names()
    names = _names_of(module, [(0, module.num_layers)])
    existing = dict(module.named_modules())
    problems = [f"{name} does not exist" for name in names if name not in existing]
    problems += [
        f"{inner} lies within {outer}"
        for outer in names
        for inner in names
        if inner != outer and inner.startswith(f"{outer}.")
    ]
    if len(set(names)) != len(names):
        problems.append("a name is given twice")
    if len(layers) != module.num_layers:
        problems.append(f"{len(layers)} layer names for {module.num_layers} layers")
    covered = tuple(f"{name}." for name in names)
    problems += [
        f"{key} has no owner" for key in module.state_dict() if not key.startswith(covered)
    ]
    if problems:
        raise ConfigError(
            f"The {prefix} {type(module).__name__} cannot be cut into stages: {problems[0]}",
            limit="layer, prologue and epilogue names are distinct submodules that hold all state",
            remedy="correct layer_names(), prologue_names() and epilogue_names()",
        )


def stage_modules(
    model: EntrainModel, *, encoder: LayerRange | None = None, llm: LayerRange | None = None
) -> list[str]:
    """Names of the modules of one stage in the order in which they run.

    Args:
        model: The whole model.
        encoder: Layers [start, stop) of an encoder stage.
        llm: Layers [start, stop) of an LLM stage.
    """
    module, own, prefix = (
        (model.encoder, encoder, "encoder.") if encoder is not None else (model.llm, llm, "llm.")
    )
    assert own is not None
    names = list(module.layer_names()[slice(*own)])
    if own[0] == 0:
        names = [*module.prologue_names(), *names]
    if own[1] == module.num_layers:
        names += module.epilogue_names()
    found = [prefix + name for name in names]
    if encoder is not None and own[1] == module.num_layers and model.projector is not None:
        found.append("projector")
    return found


def _kept_modules(
    model: EntrainModel, encoder_ranges: Sequence[LayerRange], llm_ranges: Sequence[LayerRange]
) -> list[str]:
    names = [f"encoder.{name}" for name in _names_of(model.encoder, encoder_ranges)]
    if model.projector is not None and _holds_last(model.encoder, encoder_ranges):
        names.append("projector")
    return names + [f"llm.{name}" for name in _names_of(model.llm, llm_ranges)]


def _names_of(module: PipelineModule, ranges: Sequence[LayerRange]) -> list[str]:
    layers = module.layer_names()
    names: list[str] = []
    for start, stop in ranges:
        module.check_range(start, stop)
        names += layers[start:stop]
    if any(start == 0 for start, _ in ranges):
        names += module.prologue_names()
    if _holds_last(module, ranges):
        names += module.epilogue_names()
    return names


def _holds_last(module: PipelineModule, ranges: Sequence[LayerRange]) -> bool:
    return any(stop == module.num_layers for _, stop in ranges)
