"""Attention within each sample of a packed row, without a mask over the whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKED_ATTENTION = "lightning_entrain_packed"
"""Name under which Hugging Face models find :func:`packed_attention`."""

NO_MASK = "lightning_entrain_no_mask"
"""A name Hugging Face builds no mask for: the samples' lengths say all there is to say."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention sample by sample, through Hugging Face's sdpa function.

    A mask over a row of n samples costs n times the work of the samples themselves, and keeps torch
    from its fused causal kernels.

    Args:
        module: The attention module.
        query: ``[1, heads, tokens, head_dim]``.
        key: ``[1, key_heads, tokens, head_dim]``.
        value: ``[1, key_heads, tokens, head_dim]``.
        attention_mask: Used only if ``sample_lengths`` is not given, as in generation.
        sample_lengths: Tokens of each sample.
        sliding_window: Tokens a position may look back on, itself included.
        **kwargs: Passed on.

    Returns:
        ``[1, tokens, heads, head_dim]`` and None.
    """
    if sample_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    lengths = list(sample_lengths)
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        sdpa_attention_forward(
            module, q, k, v, _window_mask(q.shape[2], sliding_window, q.device), **kwargs
        )[0]
        for q, k, v in rows
    ]
    return torch.cat(outputs, dim=1), None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask ``[1, 1, length, length]`` of a window, None if the window covers the sample."""
    if window is None or window >= length:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, sdpa_mask)
