"""Shapes of a module and of a model: all that plans need to know of the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.workload.layers import AttentionPattern, Layer
from lightning_entrain.workload.tables import SizeTable

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a module has to process: of each sample, or of a microbatch.

    Attributes:
        rows: Patches or tokens.
        merged: Rows behind the merging of patches (encoder), else equal to ``rows``.
        pairs: Query-key pairs by attention pattern. Causal pairs are counted as full squares.
    """

    rows: FloatArray
    merged: FloatArray
    pairs: Mapping[AttentionPattern, FloatArray] = field(default_factory=dict)

    def sum(self) -> Load:
        """All samples packed together: attention stays within a sample."""
        return Load(
            rows=np.atleast_1d(self.rows.sum()),
            merged=np.atleast_1d(self.merged.sum()),
            pairs={name: np.atleast_1d(value.sum()) for name, value in self.pairs.items()},
        )

    def scaled(self, factor: float) -> Load:
        """``factor`` times as much of everything."""
        return Load(
            rows=self.rows * factor,
            merged=self.merged * factor,
            pairs={name: value * factor for name, value in self.pairs.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ModuleShape:
    """One module as a row of layers with a prologue and an epilogue.

    Attributes:
        name: ``encoder`` or ``llm``.
        prologue: Layers only the first stage runs (patch or token embedding).
        blocks: The layers that stages are cut between.
        epilogue: Layers only the last stage runs (projector, head).
        hidden_size: Columns of the tensor between its stages.
        output_size: Columns of what it returns.
        extra_rows_per_image: Class tokens.
        window: Side of an attention window in patches, or length of a sliding window.
    """

    name: str
    prologue: tuple[Layer, ...]
    blocks: tuple[Layer, ...]
    epilogue: tuple[Layer, ...]
    hidden_size: int
    output_size: int
    extra_rows_per_image: int = 0
    window: int = 0

    @property
    def num_layers(self) -> int:
        """Blocks, the unit in which stages are cut."""
        return len(self.blocks)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Prologue, blocks and epilogue in order."""
        return self.prologue + self.blocks + self.epilogue

    @cached_property
    def counted_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Equal layers once, with their number."""
        return tuple(Counter(self.layers).items())

    @property
    def num_parameters(self) -> int:
        """Parameters; tied ones are counted once."""
        return sum(layer.num_parameters - layer.shared_parameters for layer in self.layers)

    def stage_layers(self, start: int, stop: int) -> tuple[Layer, ...]:
        """Layers of the stage that holds blocks ``[start, stop)``."""
        first = self.prologue if start == 0 else ()
        last = self.epilogue if stop == self.num_layers else ()
        return first + self.blocks[start:stop] + last

    def load(self, table: SizeTable) -> Load:
        """What this module processes of each sample, arrays ``[num_samples]``."""
        if self.name == "encoder":
            return self._encoder_load(table)
        tokens = table.num_tokens.astype(np.float64)
        pairs = {AttentionPattern.CAUSAL: tokens**2}
        if self.window:
            outside = np.maximum(tokens - self.window, 0.0)
            pairs[AttentionPattern.SLIDING] = tokens**2 - outside**2
        return Load(rows=tokens, merged=tokens, pairs=pairs)

    def _encoder_load(self, table: SizeTable) -> Load:
        extra = self.extra_rows_per_image
        images = table.num_images.astype(np.float64)
        patches = table.num_patches.astype(np.float64)
        full = table.full_pairs + 2.0 * extra * patches + extra**2 * images
        return Load(
            rows=patches + extra * images,
            merged=table.num_vision_tokens.astype(np.float64),
            pairs={
                AttentionPattern.FULL: full,
                AttentionPattern.WINDOW: table.window_pairs.astype(np.float64),
            },
        )


@dataclass(frozen=True, kw_only=True)
class ViewRule:
    """How a model turns an image into patches.

    Attributes:
        kind: ``qwen`` (native size, rounded), ``fixed`` (one square view) or ``tiles`` (square
            tiles of ``image_size``, with an overview when there is more than one).
        patch_size: Pixels per patch side.
        merge_size: Side of the square of patches that becomes one vision token.
        image_size: Side of a square view in pixels (not for ``qwen``).
        min_tiles: Smallest number of tiles.
        max_tiles: Largest number of tiles.
        longest_edge: Scale the longest side to this before tiling (SmolVLM); 0 for the
            best-fitting tile grid (InternVL, LLaVA-OneVision).
        tokens_per_view: Vision tokens of a view where they are not ``patches / merge_size**2``.
        min_pixels: Least area after resizing (``qwen``).
        max_pixels: Largest area after resizing (``qwen``).
    """

    kind: str = "qwen"
    patch_size: int = 14
    merge_size: int = 2
    image_size: int = 0
    min_tiles: int = 1
    max_tiles: int = 1
    longest_edge: int = 0
    tokens_per_view: int = 0
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 16384


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Encoder (with projector) and LLM.

    Attributes:
        name: Name for tables and messages.
        encoder: The vision encoder; its epilogue is the projector or merger.
        llm: The language model.
        view_rule: How images become patches.
        source: The configuration it was read from.
    """

    name: str
    encoder: ModuleShape
    llm: ModuleShape
    view_rule: ViewRule = field(default_factory=ViewRule)
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def modules(self) -> tuple[ModuleShape, ModuleShape]:
        """Encoder and LLM, in pipeline order."""
        return self.encoder, self.llm

    @property
    def num_parameters(self) -> int:
        """Parameters of both modules."""
        return self.encoder.num_parameters + self.llm.num_parameters
