"""M-RoPE positions as transformers gives them, except for tokens behind a video."""

from __future__ import annotations

from itertools import pairwise

import torch

VIDEO = 2
"""transformers' number for tokens of videos; images are 1, text is 0."""


def behind_videos(positions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Return [3, T] positions of `get_rope_index` for tokens of these kinds [T]; tokens behind each video are moved
    behind its end.

    transformers 5 continues behind a video's height and width, whatever its length. vLLM, and transformers before
    version 5, continue behind the largest of its positions.
    """
    moved = positions.clone()
    begins = [0, *((kinds[1:] != kinds[:-1]).nonzero()[:, 0] + 1).tolist(), len(kinds)]
    for begin, end in pairwise(begins):
        if kinds[begin] == VIDEO and end < len(kinds):
            moved[:, end:] += moved[:, begin:end].max() + 1 - moved[0, end]
    return moved
