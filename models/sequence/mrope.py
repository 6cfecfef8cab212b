"""M-RoPE: three positions per token (time, height, width), and the frequencies that follow from them.

Positions are computed per sample with numpy, frequencies with torch. Which tokens form a span is decided in
`models.sequence.media_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """Neighbouring tokens that stand for an image, a video, or a frame of a video."""

    begin: int
    """The place of the first token of the span in the sequence."""
    grid: Grid
    """The grid (t, h, w) in merged tokens."""
    step: float = 1.0
    """The number of temporal positions from one t to the next. The product of `t` and `step` is rounded down."""


def mrope_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> np.ndarray:
    """Return [3, T] int64 positions. `spans` are in the order of their tokens.

    The token after a span begins behind the span's largest position, as in vLLM and in the code with which Qwen2.5-VL
    was trained. transformers 5 begins behind its height and width alone, so that text after a long video overlaps with
    it.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    cursor, position = 0, 0
    for span in spans:
        t, h, w = span.grid
        end = span.begin + t * h * w
        positions[:, cursor : span.begin] = position + np.arange(span.begin - cursor)
        position += span.begin - cursor
        visual = np.indices((t, h, w)).reshape(3, -1)
        # in float32, like transformers, where a product may be just below a whole number
        visual[0] = visual[0].astype(np.float32) * np.float32(span.step)
        positions[:, span.begin : end] = position + visual
        position += max(h, w, int(visual[0, -1]) + 1)
        cursor = end
    positions[:, cursor:] = position + np.arange(num_tokens - cursor)
    return positions


class MRope(torch.nn.Module):
    """Replaces GPTModel.rotary_pos_emb. Positions are per token, so a packed stream needs no special case."""

    frequencies: torch.Tensor

    axis_of_frequency: torch.Tensor

    def __init__(self, *, dim: int, theta: float, sections: Sequence[int], is_interleaved: bool) -> None:
        """`sections` has the number of frequencies for each of (time, height, width); twice their sum is `dim`.

        If `is_interleaved`, the axes alternate while they have frequencies left, and time has the rest; otherwise they
        follow each other.
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
        """Return [T, 1, 1, dim] float32 angles from positions [3, 1, T]."""
        angles = position_ids.float()[..., None] * self.frequencies
        axis = self.axis_of_frequency.expand(1, *angles.shape[1:])
        merged = angles.gather(0, axis)[0]
        return torch.cat((merged, merged), -1).transpose(0, 1)[:, :, None, :].contiguous()
