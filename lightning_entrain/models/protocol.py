"""What a module must offer to be cut into pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.on_device import on_device

if TYPE_CHECKING:
    from lightning_entrain.workload.sizes import Grid


@dataclass(frozen=True)
class EncoderPacking:
    """How images share one row of patches; known to every rank before any pixel is loaded.

    Attributes:
        grids: Patch grid (frames, rows, columns) of each image, in row order.
    """

    grids: tuple[Grid, ...]

    @property
    def num_patches(self) -> int:
        """Rows of the encoder microbatch."""
        return sum(frames * rows * columns for frames, rows, columns in self.grids)


@dataclass(frozen=True)
class LlmPacking:
    """How samples share one row of tokens.

    Attributes:
        sample_lengths: Tokens of each sample, in row order. Positions restart at 0 in each sample,
            and no token attends to another sample.
    """

    sample_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the LLM microbatch."""
        return sum(self.sample_lengths)

    def position_ids(self, device: torch.device) -> Tensor:
        """Position of each token within its sample, ``[tokens]``, int64."""
        if not self.sample_lengths:
            return torch.zeros(0, dtype=torch.long, device=device)
        lengths = torch.tensor(self.sample_lengths)
        starts = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(self.num_tokens) - torch.repeat_interleave(starts, lengths)
        return on_device(positions, device)


def check_placeholders(found: int, num_features: int, image_token_id: int) -> None:
    """Raise ``RuntimeMismatchError`` unless a row of tokens has a place for each vision feature."""
    if found != num_features:
        raise RuntimeMismatchError(
            f"A row of tokens has {found} image placeholders (token id {image_token_id}) for "
            f"{num_features} vision features",
            limit="one placeholder per feature",
            remedy="give data and model the same image_token_id, and keep that token out of the "
            "text",
        )


class PassThrough(nn.Module):
    """Stands where another stage's submodule was; has no parameters and returns its input."""

    def forward(self, inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the first argument."""
        return inputs


class PipelineModule(nn.Module, ABC):
    """A row of layers with a prologue before the first and an epilogue after the last.

    Subclasses name their layers, prologue and epilogue by dotted submodule names. Everything else
    they hold (rotary tables and the like) must be free of parameters, and stays on every stage.
    :meth:`forward_stage` may touch only the layers ``[start, stop)``, the prologue when
    ``start == 0`` and the epilogue when ``stop == num_layers``: the runtime replaces the others by
    :class:`PassThrough`. One object may run several stages, in any order.

    Attributes:
        num_layers: Layers in the row.
        hidden_size: Columns of the tensor between two stages.
        output_size: Columns after the epilogue (features of an encoder, vocabulary of an LLM).
    """

    num_layers: int
    hidden_size: int
    output_size: int

    @abstractmethod
    def layer_names(self) -> tuple[str, ...]:
        """Dotted names of the layers' modules, in order."""

    @abstractmethod
    def prologue_names(self) -> tuple[str, ...]:
        """Dotted names of the modules that only the first stage needs."""

    @abstractmethod
    def epilogue_names(self) -> tuple[str, ...]:
        """Dotted names of the modules that only the last stage needs."""

    def tied_parameters(self) -> tuple[tuple[str, str], ...]:
        """Pairs of state-dict names that are one parameter, such as embedding and head."""
        return ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Change of device or dtype; state outside checkpoints keeps its dtype.

        Rotary frequencies rounded to bfloat16 would turn far positions by another angle.
        """
        kept = list(_floating_tables(self))
        super()._apply(fn, recurse)
        for owner, name, table in kept:
            changed = owner._buffers[name]
            if changed is not None and changed.dtype != table.dtype:
                owner._buffers[name] = table.to(changed.device)
        return self

    def check_range(self, start: int, stop: int) -> None:
        """Raise ``ConfigError`` unless ``[start, stop)`` is a non-empty range of layers."""
        if not 0 <= start < stop <= self.num_layers:
            raise ConfigError(
                f"Stage of layers [{start}, {stop})",
                limit=f"a non-empty range within the module's {self.num_layers} layers",
                remedy="use fewer stages, or a model with more layers",
            )


class EncoderModule(PipelineModule):
    """A modality encoder: pixels in, features out.

    Attributes:
        merge_size: Side of the square of patches that becomes one feature row.
        patch_dim: Columns of the pixel tensor.
    """

    merge_size: int
    patch_dim: int

    @abstractmethod
    def forward_stage(
        self, inputs: Tensor, packing: EncoderPacking, *, start: int, stop: int
    ) -> Tensor:
        """Run the layers ``[start, stop)``.

        Args:
            inputs: Pixels ``[patches, patch_dim]`` if ``start`` is 0, else hidden states
                ``[patches, hidden_size]``.
            packing: The images of the row.
            start: First layer.
            stop: One past the last layer.

        Returns:
            ``[patches, hidden_size]``, or features ``[merged, output_size]`` after the last layer,
            in the images' own order.
        """


class LlmModule(PipelineModule):
    """A decoder: features and token ids in, logits out.

    Attributes:
        image_token_id: Token id whose positions the features fill, in order.
    """

    image_token_id: int

    @abstractmethod
    def forward_stage(
        self,
        inputs: Tensor | None,
        packing: LlmPacking,
        *,
        start: int,
        stop: int,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the layers ``[start, stop)``.

        Args:
            inputs: Features ``[merged, hidden_size]`` or None if ``start`` is 0, else
                ``[tokens, hidden_size]``.
            packing: The samples of the row.
            start: First layer.
            stop: One past the last layer.
            input_ids: Token ids ``[tokens]``; needed if ``start`` is 0.

        Returns:
            ``[tokens, hidden_size]``, or logits ``[tokens, output_size]`` after the last layer.
        """


def _floating_tables(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name in owner._non_persistent_buffers_set:
            table = owner._buffers.get(name)
            if table is not None and table.is_floating_point():
                yield owner, name, table


def refuse_dropout(module: nn.Module, what: str) -> None:
    """Raise ``ConfigError`` if ``module`` drops anything outside ``nn.Dropout`` layers.

    Those are replaced by layers with equal masks in every layout. Attention dropout happens inside
    the attention kernel and cannot be seeded per sample: two layouts of a batch could not agree.
    """
    for name, rate in _dropout_rates(module):
        if rate > 0:
            raise ConfigError(
                f"{what} has dropout {rate} in {name}",
                limit="0, because its random masks differ between groupings of the same samples",
                remedy="set attention_dropout and the like to 0 in its config; nn.Dropout layers "
                "may stay",
            )


def _dropout_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    for name, child in module.named_modules():
        for attribute in ("attention_dropout", "attn_dropout", "dropout"):
            rate = getattr(child, attribute, None)
            if isinstance(rate, float):
                yield f"{name}.{attribute}".lstrip("."), rate
