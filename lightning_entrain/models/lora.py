"""Low-rank adapters (LoRA) through peft, which the extra ``lora`` installs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_entrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lightning_entrain.models.entrain_model import EntrainModel

PARTS = ("encoder", "llm")
"""Modules that can have adapters."""

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FOLDERS = {"encoder": "vision", "llm": "llm"}


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters of one module.

    Attributes:
        rank: Columns between the two factors.
        alpha: The product is scaled by ``alpha / rank``.
        dropout: Rate of dropout before the first factor; counted, so equal in every layout.
        targets: Names of the linear layers that get adapters, or their last parts (``q_proj``);
            None takes all linear layers of the module's layers.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"LoRA's rank is {self.rank}", limit="at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA's dropout is {self.dropout}", limit="at least 0, below 1")


def add_lora(
    model: EntrainModel,
    *,
    encoder: LoraOptions | None = None,
    llm: LoraOptions | None = None,
    seed: int = 0,
) -> None:
    """Put adapters beside linear layers, in place; the rest of such a module is frozen.

    The module computes what it did before, until the adapters are trained. Linear layers keep
    their weights under ``base_layer``. Call it on the whole model, before a fit.

    Args:
        model: The model; modules without options stay as they are, trained or frozen.
        encoder: Adapters of the encoder.
        llm: Adapters of the LLM.
        seed: Of the adapters' values and their dropout.

    Raises:
        ConfigError: If peft is missing, or no layer has a target's name, or there are adapters
            already.
    """
    peft = _peft()
    from lightning_entrain.models.tiny import seeded

    with seeded(seed):
        for part, options in (("encoder", encoder), ("llm", llm)):
            if options is None:
                continue
            module = getattr(model, part)
            if any(True for _ in _adapted(module)):
                raise ConfigError(f"The {part} has adapters already", limit="one set of adapters")
            whole = module.hugging_face_model
            config = peft.LoraConfig(
                r=options.rank,
                lora_alpha=options.alpha,
                lora_dropout=options.dropout,
                target_modules=_targets(part, module, options),
            )
            training = whole.training
            peft.inject_adapter_in_model(config, whole)
            module.train(training)
    model.count_dropout(seed)


def lora_options(model: EntrainModel) -> dict[str, LoraOptions]:
    """The adapters of a model, by part; also of one reduced to a stage."""
    found = {}
    for part in PARTS:
        configs = getattr(getattr(getattr(model, part), "_hf", (None,))[0], "peft_config", None)
        if configs:
            (config,) = configs.values()
            found[part] = LoraOptions(
                rank=config.r,
                alpha=float(config.lora_alpha),
                dropout=float(config.lora_dropout),
                targets=tuple(sorted(config.target_modules)),
            )
    return found


def lora_record(model: EntrainModel) -> dict[str, Any]:
    """:func:`lora_options` as plain values, for checkpoints."""
    return {
        part: {**asdict(options), "targets": list(options.targets or ())}
        for part, options in lora_options(model).items()
    }


def lora_from_record(record: Mapping[str, Any]) -> dict[str, LoraOptions]:
    """Inverse of :func:`lora_record`."""
    return {
        part: LoraOptions(**{**own, "targets": tuple(own["targets"])})
        for part, own in record.items()
    }


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """State dict of a Hugging Face model in which the adapters are part of the weights.

    Its names are those of the model without adapters. The model itself is not changed.
    """
    state = {
        name.replace(".base_layer.", "."): value.detach()
        for name, value in module.state_dict().items()
        if ".lora_" not in name
    }
    with torch.no_grad():
        for name, layer in _adapted(module):
            weight = layer.get_base_layer().weight
            delta = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
            state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return state


def save_adapters(model: EntrainModel, folder: str | Path) -> None:
    """Write the adapters alone, in peft's format: ``vision/`` and ``llm/`` below ``folder``.

    ``PeftModel.from_pretrained`` reads each beside its base model.

    Raises:
        ConfigError: If the model has no adapters.
    """
    peft = _peft()
    parts = lora_options(model)
    if not parts:
        raise ConfigError("The model has no adapters", remedy="call add_lora first")
    for part in parts:
        whole = getattr(model, part).hugging_face_model
        target = Path(folder) / _FOLDERS[part]
        target.mkdir(parents=True, exist_ok=True)
        state = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
        named = {
            name if name.startswith(_PREFIX) else _PREFIX + name: value.detach().contiguous()
            for name, value in state.items()
        }
        save_file(named, str(target / _FILE))
        (config,) = whole.peft_config.values()
        config.save_pretrained(str(target))


def load_adapters(model: EntrainModel, folder: str | Path) -> None:
    """Read what :func:`save_adapters` wrote, into a model that has such adapters.

    Raises:
        CheckpointError: If a file is missing, or holds other adapters.
    """
    peft = _peft()
    for part in lora_options(model):
        path = Path(folder) / _FOLDERS[part] / _FILE
        if not path.is_file():
            raise CheckpointError(f"There is no {path}", limit=f"adapters of the {part}")
        state = {name.removeprefix(_PREFIX): t for name, t in load_file(str(path)).items()}
        whole = getattr(model, part).hugging_face_model
        expected = set(peft.get_peft_model_state_dict(whole, save_embedding_layers=False))
        if set(state) != {name.removeprefix(_PREFIX) for name in expected}:
            raise CheckpointError(
                f"{path} holds other adapters than the model has",
                limit="the same target layers",
                remedy="call add_lora with the options of the run that wrote it",
            )
        peft.set_peft_model_state_dict(whole, state)


def _targets(part: str, module: Any, options: LoraOptions) -> list[str]:
    linear = [
        f"{layer}.{name}"
        for layer in module.layer_names()
        for name, child in module.get_submodule(layer).named_modules()
        if isinstance(child, nn.Linear)
    ]
    if options.targets is None:
        return linear
    for target in options.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"LoRA target {target!r} of the {part}",
                limit="the name of a linear layer, such as " + linear[0].rsplit(".", 1)[-1],
            )
    return [n for n in linear if any(n == t or n.endswith(f".{t}") for t in options.targets)]


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers with adapters."""
    for name, part in module.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "get_delta_weight"):
            yield name, part


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "LoRA needs the package peft, which is not installed",
            remedy="pip install 'lightning_entrain[lora]'",
        ) from error
    return peft
