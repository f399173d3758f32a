"""Maps encoder features to the LLM's hidden size."""

from __future__ import annotations

from torch import Tensor, nn


class MlpProjector(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        input_size: Columns of the encoder's features.
        output_size: The LLM's hidden size.
        hidden_size: Columns between the layers; ``output_size`` by default.
    """

    def __init__(self, input_size: int, output_size: int, hidden_size: int | None = None) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.linear_in = nn.Linear(input_size, hidden_size or output_size)
        self.activation = nn.GELU()
        self.linear_out = nn.Linear(hidden_size or output_size, output_size)

    def forward(self, features: Tensor) -> Tensor:
        """``[merged, input_size]`` to ``[merged, output_size]``."""
        return self.linear_out(self.activation(self.linear_in(features)))
