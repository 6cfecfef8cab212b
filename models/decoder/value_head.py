"""The head of a critic: the value of a state from its hidden state.

N states, h hidden size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

NAME = "value_head"
"""The name of the head in `VisionLanguageModel`."""


class ValueHead(torch.nn.Module):
    """A linear layer that is whole on every tensor-parallel rank. It begins at 0, so that all values begin at 0, and so
    that they are the same in every layout."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden_Nh: torch.Tensor) -> torch.Tensor:
        """Return [N] float32 values. `hidden_Nh` must be the same on all tensor-parallel ranks, and so is its
        gradient."""
        return functional.linear(hidden_Nh.float(), self.weight.float()).squeeze(-1)
