"""The Hugging Face Qwen2.5-VL vision transformer as a row of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.on_device import on_device
from lightning_entrain.models.protocol import EncoderModule, EncoderPacking, refuse_dropout
from lightning_entrain.workload.sizes import Grid


@dataclass(frozen=True)
class VisionLayout:
    """What the layers need to know of a row of images; follows from the grids alone.

    Attributes:
        window_order: Order of the merged squares by attention window, ``[merged]``.
        reverse_order: Inverse permutation.
        position_ids: Row and column of each patch, ``[patches, 2]``, in window order.
        frame_bounds: Cumulative patches at frame ends, for layers of full attention, int32.
        window_bounds: Cumulative patches at window ends, int32.
    """

    window_order: np.ndarray
    reverse_order: np.ndarray
    position_ids: np.ndarray
    frame_bounds: np.ndarray
    window_bounds: np.ndarray


def _image_layout(
    rows: int, columns: int, merge: int, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One frame: order of its merged squares by window, squares per window, patch positions."""
    merged_rows, merged_columns = rows // merge, columns // merge
    row, column = np.divmod(np.arange(merged_rows * merged_columns), merged_columns)
    windows_across = -(-merged_columns // window)
    window_index = (row // window) * windows_across + column // window
    order = np.argsort(window_index, kind="stable")
    squares = np.bincount(window_index)
    inner_row, inner_column = np.divmod(np.arange(merge * merge), merge)
    positions = np.stack(
        [
            (row[:, None] * merge + inner_row).ravel(),
            (column[:, None] * merge + inner_column).ravel(),
        ],
        axis=-1,
    )
    return order, squares[squares > 0], positions


@lru_cache(maxsize=256)
def vision_layout(grids: tuple[Grid, ...], merge_size: int, window_size: int) -> VisionLayout:
    """Window order, positions and attention bounds of a row of images.

    Args:
        grids: Patch grid (frames, rows, columns) of each image.
        merge_size: Side of the square of patches that is merged into one feature row.
        window_size: Side of an attention window, in merged squares.

    Raises:
        RuntimeMismatchError: If a grid is not a multiple of ``merge_size``.
    """
    orders, squares, positions, frame_patches = [], [], [], []
    offset = 0
    for grid in grids:
        frames, rows, columns = grid
        if min(grid) < 1 or rows % merge_size or columns % merge_size:
            raise RuntimeMismatchError(
                f"An image's patch grid is {grid}",
                limit=f"at least 1 frame, rows and columns positive multiples of {merge_size}",
                remedy="size images by the rule that belongs to this encoder",
            )
        order, sizes, patch_positions = _image_layout(rows, columns, merge_size, window_size)
        for _ in range(frames):
            orders.append(order + offset)
            squares.append(sizes)
            positions.append(patch_positions)
            frame_patches.append(rows * columns)
            offset += order.size
    window_order = np.concatenate(orders)
    unit = merge_size**2
    flat = np.concatenate(positions).reshape(-1, unit, 2)[window_order].reshape(-1, 2)
    return VisionLayout(
        window_order=window_order,
        reverse_order=np.argsort(window_order),
        position_ids=flat,
        frame_bounds=_bounds(np.asarray(frame_patches)),
        window_bounds=_bounds(np.concatenate(squares) * unit),
    )


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class QwenVisionEncoder(EncoderModule):
    """Runs slices of a ``Qwen2_5_VisionTransformerPretrainedModel``.

    Submodules are the given model's own, under its own names, so its state dict is unchanged.
    Between stages the patches are in window order; the last stage merges squares of patches and
    restores the images' order.

    Args:
        model: The Hugging Face vision transformer.
    """

    blocks: nn.ModuleList
    patch_embed: nn.Module
    merger: nn.Module
    rotary_pos_emb: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config: Any = model.config
        if getattr(config, "model_type", None) != "qwen2_5_vl_vision":
            raise ConfigError(
                f"The encoder is a {type(model).__name__}",
                limit="QwenVisionEncoder takes the vision transformer of Qwen2.5-VL",
                remedy="pass model.visual of a Qwen2.5-VL model",
            )
        refuse_dropout(model, "The vision encoder")
        self._hf = (model,)  # in a tuple: not a submodule, its children are
        self._modules = model._modules
        self.config = config
        self.num_layers = len(self.blocks)
        self.hidden_size = config.hidden_size
        self.output_size = config.out_hidden_size
        self.merge_size = config.spatial_merge_size
        self.patch_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.window_size = config.window_size // self.merge_size // config.patch_size

    @property
    def hugging_face_model(self) -> Any:
        """The model given at construction; it shares all submodules with this one."""
        return self._hf[0]

    def layer_names(self) -> tuple[str, ...]:
        """``blocks.0`` and so on."""
        return tuple(f"blocks.{index}" for index in range(self.num_layers))

    def prologue_names(self) -> tuple[str, ...]:
        """The patch embedding."""
        return ("patch_embed",)

    def epilogue_names(self) -> tuple[str, ...]:
        """The merger of 2x2 patches."""
        return ("merger",)

    def forward_stage(
        self, inputs: Tensor, packing: EncoderPacking, *, start: int, stop: int
    ) -> Tensor:
        """See :meth:`EncoderModule.forward_stage`."""
        self.check_range(start, stop)
        if inputs.shape[0] != packing.num_patches:
            raise RuntimeMismatchError(
                f"An encoder stage got {inputs.shape[0]} patches",
                limit=f"the {packing.num_patches} patches of the grids it was announced",
            )
        layout = vision_layout(packing.grids, self.merge_size, self.window_size)
        device = inputs.device
        hidden = inputs
        if start == 0:
            order = on_device(layout.window_order, device)
            hidden = self.patch_embed(hidden)
            hidden = hidden.view(order.numel(), self.merge_size**2, -1)[order].flatten(0, 1)
        rotary = self._rotary(layout, device)
        bounds_device = device if "flash" in str(self.config._attn_implementation) else "cpu"
        frames = on_device(layout.frame_bounds, bounds_device)
        windows = on_device(layout.window_bounds, bounds_device)
        for index in range(start, stop):
            full = index in self.config.fullatt_block_indexes
            hidden = self.blocks[index](
                hidden, cu_seqlens=frames if full else windows, position_embeddings=rotary
            )
        if stop == self.num_layers:
            reverse = on_device(layout.reverse_order, device)
            hidden = self.merger(hidden)[reverse]
        return hidden

    def _rotary(self, layout: VisionLayout, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[patches, head_dim]``, fp32."""
        positions = on_device(layout.position_ids, device)
        frequencies = self.rotary_pos_emb.inv_freq.to(device=device, dtype=torch.float32)
        angles = (positions[:, :, None].float() * frequencies).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
