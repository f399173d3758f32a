"""What a checkpoint tells of the model, so that it can be built again without the run's code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_entrain.errors import CheckpointError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.lora import add_lora, lora_from_record, lora_record


def model_record(module: nn.Module) -> dict[str, Any] | None:
    """Configurations of the EntrainModel inside a module, as plain values.

    Args:
        module: The LightningModule, whole or reduced to a rank's stages.

    Returns:
        None if there is no EntrainModel, or its parts are not Hugging Face modules.
    """
    for name, part in module.named_modules():
        if isinstance(part, EntrainModel):
            vision = getattr(part.encoder, "hugging_face_model", None)
            text = getattr(part.llm, "hugging_face_model", None)
            if vision is None or text is None:
                return None
            return {
                "prefix": f"{name}." if name else "",
                "vision_config": _plain_config(vision.config),
                "text_config": _plain_config(text.config),
                "image_token_id": int(getattr(part.llm, "image_token_id", 0)),
                "projector": "none" if part.projector is None else "mlp",
                "lora": lora_record(part),
            }
    return None


def build_model(record: Mapping[str, Any]) -> EntrainModel:
    """The model of a record, with random weights."""
    from lightning_entrain.models.tiny import vlm_from_configs

    model = vlm_from_configs(
        record["vision_config"],
        record["text_config"],
        image_token_id=record["image_token_id"],
        projector=record["projector"],
    )
    if record.get("lora"):
        adapters = lora_from_record(record["lora"])
        add_lora(model, encoder=adapters.get("encoder"), llm=adapters.get("llm"))
    return model


def load_weights(model: EntrainModel, state: Mapping[str, Any], prefix: str | None = None) -> None:
    """Give a model the tensors of a checkpoint's state dict, in the dtype they have there.

    Args:
        model: The whole model.
        state: The LightningModule's state dict.
        prefix: What comes before the model's names in it; found out if None.

    Raises:
        CheckpointError: If the state dict is not that of such a model.
    """
    own = set(model.state_dict())
    if prefix is None:
        probe = next(iter(model.state_dict()))
        prefix = next((n.removesuffix(probe) for n in state if n.endswith(probe)), "")
    found = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    missing, unlike = (
        sorted(own - set(found)),
        [
            name
            for name, tensor in model.state_dict().items()
            if name in found and found[name].shape != tensor.shape
        ],
    )
    if missing or unlike:
        name = (missing or unlike)[0]
        raise CheckpointError(
            f"The checkpoint has no tensor for the model's {name}"
            + ("" if missing else f" of shape {tuple(model.state_dict()[name].shape)}"),
            limit="the model that the run trained",
            remedy="pass the configuration of the run that wrote the checkpoint",
        )
    model.load_state_dict({n: t.clone() for n, t in found.items() if n in own}, assign=True)
    for part in (model.encoder, model.llm):
        tie = getattr(getattr(part, "hugging_face_model", None), "tie_weights", None)
        if tie is not None:
            tie()


def _plain_config(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string(use_diff=False))
    # The implementation of attention is that of the process that trains.
    return {key: value for key, value in fields.items() if not key.startswith("_attn")}
