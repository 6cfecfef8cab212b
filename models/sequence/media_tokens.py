"""Finds which tokens of a sample are its images and videos. The tokens also say which kind a medium is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.sequence.mrope import Grid, MediaSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """The tokens that a model family uses for media."""

    image_token_id: int
    video_token_id: int | None = None
    """The token of videos; None if a video's frames count as images."""
    merge_size: int
    """The number of patches per visual token along each side."""
    has_mrope: bool = True
    """False if the position of every token, also of a media token, is its place in the sequence."""
    tokens_per_second: float | None = None
    """The number of temporal positions per second of video. None if each frame of a video is its own span, with its
    time as text before it."""

    @property
    def visual_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that stand for media in a prompt."""
        if self.video_token_id is None:
            return (self.image_token_id,)
        return self.image_token_id, self.video_token_id


def qwen_token_layout(hf_config: Any, *, tokens_per_second: float | None = None) -> TokenLayout:
    """Return which tokens the Qwen-VL families use for media, and how."""
    return TokenLayout(
        image_token_id=hf_config.image_token_id,
        video_token_id=hf_config.video_token_id,
        merge_size=hf_config.vision_config.spatial_merge_size,
        tokens_per_second=tokens_per_second,
    )


def media_spans(
    tokens: np.ndarray,
    slots: np.ndarray,
    grids: Sequence[Grid],
    seconds_per_grid: Sequence[float],
    layout: TokenLayout,
) -> list[MediaSpan]:
    """Return the spans of a sample's media, in order.

    `slots`: the visual tokens. `grids`: (t, h, w) in patches, per medium in the order of the tokens;
    `seconds_per_grid`: for each medium, the seconds from one t to the next (unused for images). Raises ValueError if
    tokens and grids contradict each other.
    """
    merged = [(t, h // layout.merge_size, w // layout.merge_size) for t, h, w in grids]
    num_wanted = sum(t * h * w for t, h, w in merged)
    if len(slots) != num_wanted:
        raise ValueError(
            f"{len(slots)} image and video tokens, and media {tuple(grids)} that make {num_wanted}; expand each "
            f"medium's token to t * h * w / {layout.merge_size**2} of them"
        )
    spans: list[MediaSpan] = []
    cursor = 0
    for number, grid in enumerate(merged):
        kind = tokens[slots[cursor]]
        seconds = seconds_per_grid[number] if seconds_per_grid else 1.0
        for part, step in _parts(grid, bool(kind == layout.video_token_id), seconds, layout.tokens_per_second):
            size = int(np.prod(part))
            run = slots[cursor : cursor + size]
            if run[-1] - run[0] != size - 1 or (tokens[run] != kind).any():
                raise ValueError(
                    f"medium {number} with grid {tuple(grids[number])} needs {size} equal tokens in a row from token "
                    f"{run[0]} on, and there are fewer; its grid is not that of its tokens"
                )
            spans.append(MediaSpan(begin=int(run[0]), grid=part, step=step))
            cursor += size
    return spans


def _parts(grid: Grid, is_video: bool, seconds: float, tokens_per_second: float | None) -> Iterator[tuple[Grid, float]]:
    """Yield (grid, temporal step) of each span of a medium."""
    t, h, w = grid
    if not is_video:
        yield grid, 1.0
    elif tokens_per_second is None:
        yield from [((1, h, w), 1.0)] * t
    else:
        yield grid, tokens_per_second * seconds
