"""Hugging Face decoders as a row of layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.on_device import chosen_rows
from lightning_entrain.models.packed_attention import NO_MASK, PACKED_ATTENTION
from lightning_entrain.models.protocol import (
    LlmModule,
    LlmPacking,
    check_placeholders,
    refuse_dropout,
)

VERIFIED_FAMILIES = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2"}
)
"""Values of ``config.model_type`` whose slices were compared with the whole model."""


class DecoderLlm(LlmModule):
    """Runs slices of a Hugging Face causal language model.

    Submodules are the given model's own, under its own names, so its state dict is unchanged. A
    slice runs the family's own ``forward`` over a shallow copy of the model that holds just those
    layers: masks, rotary tables, sliding windows and logit caps stay Hugging Face's. Samples lie
    packed in one row. With attention ``sdpa`` each sample is attended to on its own; with others
    the mask follows from position ids that restart at 0.

    Args:
        model: A causal language model with ``model.embed_tokens``, ``model.layers``,
            ``model.norm`` and ``lm_head``.
        image_token_id: Token id of the placeholders that vision features replace. It may lie
            outside the vocabulary.
        allow_unverified: Accept families outside ``VERIFIED_FAMILIES``. Compare slices with the
            whole model first: a family whose ``forward`` does more than loop over its layers would
            give wrong results without an error.
    """

    model: Any
    lm_head: nn.Module

    def __init__(
        self, model: nn.Module, *, image_token_id: int, allow_unverified: bool = False
    ) -> None:
        super().__init__()
        config: Any = model.config
        _check_structure(model, config, allow_unverified)
        refuse_dropout(model, "The LLM")
        self._hf = (model,)  # in a tuple: not a submodule, its children are
        self._modules = model._modules
        if config._attn_implementation == "sdpa":
            config._attn_implementation = PACKED_ATTENTION
        self.config = config
        self.image_token_id = image_token_id
        self.num_layers = len(self.model.layers)
        self.hidden_size = config.hidden_size
        self.output_size = config.vocab_size

    @property
    def hugging_face_model(self) -> Any:
        """The model given at construction; it shares all submodules with this one."""
        return self._hf[0]

    def layer_names(self) -> tuple[str, ...]:
        """``model.layers.0`` and so on."""
        return tuple(f"model.layers.{index}" for index in range(self.num_layers))

    def prologue_names(self) -> tuple[str, ...]:
        """The token embedding."""
        return ("model.embed_tokens",)

    def epilogue_names(self) -> tuple[str, ...]:
        """The last norm and the head."""
        return ("model.norm", "lm_head")

    def tied_parameters(self) -> tuple[tuple[str, str], ...]:
        """Embedding and head, if they are one parameter."""
        embedding = getattr(self.model.embed_tokens, "weight", None)
        if embedding is not None and embedding is getattr(self.lm_head, "weight", None):
            return (("model.embed_tokens.weight", "lm_head.weight"),)
        return ()

    def forward_stage(
        self,
        inputs: Tensor | None,
        packing: LlmPacking,
        *,
        start: int,
        stop: int,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`LlmModule.forward_stage`."""
        self.check_range(start, stop)
        hidden = self._embed(input_ids, inputs) if start == 0 else inputs
        if hidden is None or hidden.shape[0] != packing.num_tokens:
            raise RuntimeMismatchError(
                f"An LLM stage got {0 if hidden is None else hidden.shape[0]} tokens",
                limit=f"the {packing.num_tokens} tokens of the row it was announced",
            )
        last = stop == self.num_layers
        packed = self.config._attn_implementation == PACKED_ATTENTION
        output = self._view(start, stop, last, packed)(
            inputs_embeds=hidden.unsqueeze(0),
            position_ids=packing.position_ids(hidden.device).unsqueeze(0),
            use_cache=False,
            return_dict=True,
            **({"sample_lengths": packing.sample_lengths} if packed else {}),
        )
        return (output.logits if last else output.last_hidden_state).squeeze(0)

    def _embed(self, input_ids: Tensor | None, features: Tensor | None) -> Tensor:
        """Token embeddings ``[tokens, hidden_size]`` with features at the placeholders."""
        if input_ids is None:
            raise RuntimeMismatchError(
                "The first LLM stage got no token ids", remedy="pass input_ids when start is 0"
            )
        is_image = input_ids == self.image_token_id
        num_features = 0 if features is None else features.shape[0]
        if is_image.device.type == "cpu":
            check_placeholders(int(is_image.sum()), num_features, self.image_token_id)
        elif is_image.device.type == "cuda":  # the host, which does not wait, has seen check_rows
            torch._assert_async(is_image.sum() == num_features, "one placeholder per feature")
        embeds = self.model.embed_tokens(input_ids.masked_fill(is_image, 0))
        if features is None or num_features == 0:
            return embeds
        places = chosen_rows(is_image, num_features)
        return embeds.index_copy(0, places, features.to(embeds.dtype))

    def _view(self, start: int, stop: int, last: bool, packed: bool) -> Any:
        """The Hugging Face model with just these layers; made anew, for modules may be replaced."""
        config = copy.copy(self.config)
        config.__dict__["num_hidden_layers"] = stop - start
        if getattr(config, "layer_types", None) is not None:
            config.__dict__["layer_types"] = list(config.layer_types[start:stop])
        if packed:
            config.__dict__["_attn_implementation_internal"] = NO_MASK
        base = _shallow_copy(self.model, config, self.training)
        base._modules["layers"] = self.model.layers[start:stop]
        base._modules["embed_tokens"] = None
        if last:
            whole = _shallow_copy(self._hf[0], config, self.training)
            whole._modules["model"] = base
            return whole.forward
        base._modules["norm"] = nn.Identity()
        return base.forward


def _shallow_copy(module: nn.Module, config: Any, training: bool) -> Any:
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update(_modules=dict(module._modules), config=config, training=training)
    return twin


def _check_structure(model: nn.Module, config: Any, allow_unverified: bool) -> None:
    base = getattr(model, "model", None)
    wanted = [(base, "embed_tokens"), (base, "layers"), (base, "norm"), (model, "lm_head")]
    missing = [
        name for owner, name in wanted if not isinstance(getattr(owner, name, None), nn.Module)
    ]
    if missing:
        raise ConfigError(
            f"The LLM is a {type(model).__name__} without {', '.join(missing)}",
            limit="a model with model.embed_tokens, model.layers, model.norm and lm_head",
            remedy="pass a ...ForCausalLM, or write an LlmModule for this architecture",
        )
    family = getattr(config, "model_type", "unknown")
    if family not in VERIFIED_FAMILIES and not allow_unverified:
        raise ConfigError(
            f"The LLM's model_type is {family!r}",
            limit="families whose slices are known to equal the whole: "
            + ", ".join(sorted(VERIFIED_FAMILIES)),
            remedy="compare its slices with the whole model, then pass allow_unverified=True",
        )
