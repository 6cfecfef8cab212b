"""M-RoPE: three positions per token (time, height, width), and the frequencies they turn into.

Positions are per sample and numpy, frequencies are torch. Images only: a video's time step is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Grid = tuple[int, int, int]


def mrope_positions(is_image: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
    """[3, T] int64 positions as transformers' get_rope_index gives them.

    is_image: [T] bool, True on image tokens. grids: (t, h, w) of each image, in merged tokens.
    """
    positions = np.empty((3, len(is_image)), dtype=np.int64)
    cursor, position = 0, 0
    for t, h, w in grids:
        start = cursor + int(np.argmax(is_image[cursor:]))
        stop = start + t * h * w
        positions[:, cursor:start] = position + np.arange(start - cursor)
        position += start - cursor
        positions[:, start:stop] = position + np.indices((t, h, w)).reshape(3, -1)
        position += max(h, w)
        cursor = stop
    positions[:, cursor:] = position + np.arange(len(is_image) - cursor)
    return positions


class MRope(torch.nn.Module):
    """Takes the place of GPTModel.rotary_pos_emb; positions are per token, so packing needs nothing more."""

    frequencies: torch.Tensor

    axis_of_frequency: torch.Tensor

    def __init__(self, *, dim: int, theta: float, sections: Sequence[int], is_interleaved: bool) -> None:
        """`sections`: how many frequencies each of (time, height, width) has; twice their sum is `dim`.

        `is_interleaved`: the axes take turns as long as they have frequencies left, and time has the rest; otherwise
        they follow each other.
        """
        super().__init__()
        assert 2 * sum(sections) == dim
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
        if is_interleaved:
            axes = torch.zeros(sum(sections), dtype=torch.int64)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        self.register_buffer("axis_of_frequency", axes, persistent=False)
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, position_ids: torch.Tensor, mrope_section: Any = None, cp_group: Any = None) -> torch.Tensor:
        """[T, 1, 1, dim] float32 angles from positions [3, 1, T]."""
        angles = position_ids.float()[..., None] * self.frequencies
        axis = self.axis_of_frequency.expand(1, *angles.shape[1:])
        merged = angles.gather(0, axis)[0]
        return torch.cat((merged, merged), -1).transpose(0, 1)[:, :, None, :].contiguous()
