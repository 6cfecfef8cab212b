"""Samples of a microbatch as one packed stream. The same on every rank of a replica; pixels where there are any.

Leaves out normalising pixels (models.vision) and what is done with the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from models.attention import Segments
from models.mrope import Grid, mrope_positions


class Sample(Protocol):
    """What packing needs of a training sample."""

    @property
    def token_ids(self) -> np.ndarray:
        """[T] int64, image tokens expanded."""

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] bool, True on tokens to score."""

    @property
    def grid_thw(self) -> tuple[Grid, ...]:
        """(t, h, w) in patches, per image."""

    @property
    def patches(self) -> tuple[np.ndarray, ...]:
        """uint8 [num_patches, D] per image; empty where no pixels are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """What a model family says about its tokens."""

    image_token_id: int
    video_token_id: int
    merge_size: int
    """Patches per visual token, along each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One microbatch on one rank. T tokens, K scored tokens, V visual tokens."""

    token_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[3, 1, T] M-RoPE positions."""
    segments: Segments
    """One per sample, and one of padding where there is any."""
    predict_rows: torch.Tensor
    """[K] the tokens whose output predicts a scored token: the one before it."""
    labels: torch.Tensor
    """[K] the scored tokens, sample by sample."""
    num_scored: tuple[int, ...]
    """Scored tokens of each sample; sums to K."""
    images: tuple[np.ndarray, ...]
    """Patches of every distinct image, in the order of `grids`; empty where the caller gave none."""
    grids: tuple[Grid, ...]
    """(t, h, w) in patches of every distinct image."""
    visual_slots: torch.Tensor
    """[V] the tokens that are visual."""
    visual_rows: torch.Tensor
    """[V] which row of the distinct images' embeddings each of them takes."""


def pack(
    samples: Sequence[Sample], layout: TokenLayout, *, multiple_of: int, device: torch.device, with_pixels: bool
) -> PackedBatch:
    """Pack samples one after another, padded to a multiple of `multiple_of` tokens; no samples give padding alone.

    With pixels, images that are the same array object are encoded once: let samples of a group share theirs.
    """
    parts = [_sample_arrays(number, sample, layout) for number, sample in enumerate(samples)]
    lengths = [len(sample.token_ids) for sample in samples]
    padding = -sum(lengths) % multiple_of if samples else multiple_of
    if padding:
        lengths.append(padding)
        parts.append({"tokens": np.zeros(padding, np.int64), "positions": _text_positions(padding)})
    begins = np.concatenate([[0], np.cumsum(lengths)])
    images = _distinct_images(samples, layout, with_pixels)

    def stream(name: str, *, shifted: bool = False) -> torch.Tensor:
        arrays = [part[name] + (begin if shifted else 0) for part, begin in zip(parts, begins) if name in part]
        joined = np.concatenate(arrays, axis=-1) if arrays else np.empty(0, np.int64)
        return torch.from_numpy(np.ascontiguousarray(joined)).to(device)

    return PackedBatch(
        token_ids=stream("tokens"),
        position_ids=stream("positions")[:, None],
        segments=Segments(begins.tolist(), device),
        predict_rows=stream("predict_rows", shifted=True),
        labels=stream("labels"),
        num_scored=tuple(len(part["labels"]) for part in parts if "labels" in part),
        images=images.patches,
        grids=images.grids,
        visual_slots=stream("visual_slots", shifted=True),
        visual_rows=torch.from_numpy(images.rows).to(device),
    )


def _sample_arrays(number: int, sample: Sample, layout: TokenLayout) -> Mapping[str, np.ndarray]:
    tokens = sample.token_ids
    given = ~sample.loss_mask  # a policy may sample any token; only those of the prompt stand for media
    is_image = given & (tokens == layout.image_token_id)
    merged = [(t, h // layout.merge_size, w // layout.merge_size) for t, h, w in sample.grid_thw]
    num_wanted = sum(t * h * w for t, h, w in merged)
    if int(is_image.sum()) != num_wanted:
        raise ValueError(
            f"sample {number} has {int(is_image.sum())} image tokens and images {sample.grid_thw} that make "
            f"{num_wanted}; expand one image token to t * h * w / {layout.merge_size**2} of them per image"
        )
    if (given & (tokens == layout.video_token_id)).any():
        raise ValueError(f"sample {number} holds video tokens; this version trains on images and text only")
    scored = np.flatnonzero(sample.loss_mask)
    if len(scored) and scored[0] == 0:
        raise ValueError(f"sample {number} scores its first token, which nothing predicts; mask it out")
    return {
        "tokens": tokens,
        "positions": mrope_positions(is_image, merged) if merged else _text_positions(len(tokens)),
        "predict_rows": scored - 1,
        "labels": tokens[scored],
        "visual_slots": np.flatnonzero(is_image),
    }


def _text_positions(length: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length), (3, length))


@dataclass(frozen=True, slots=True)
class _Images:
    patches: tuple[np.ndarray, ...]
    grids: tuple[Grid, ...]
    rows: np.ndarray


def _distinct_images(samples: Sequence[Sample], layout: TokenLayout, with_pixels: bool) -> _Images:
    if not with_pixels:
        return _Images((), (), np.empty(0, np.int64))
    first_row: dict[tuple[int, Grid], int] = {}
    patches: list[np.ndarray] = []
    grids: list[Grid] = []
    rows: list[np.ndarray] = []
    num_rows = 0
    for number, sample in enumerate(samples):
        if len(sample.patches) != len(sample.grid_thw):
            raise ValueError(
                f"sample {number} has {len(sample.patches)} images' patches and {len(sample.grid_thw)} grids; "
                "a rank with needs_pixels must be given the patches of every image"
            )
        for array, grid in zip(sample.patches, sample.grid_thw):
            t, h, w = grid
            if array.shape[0] != t * h * w:
                raise ValueError(f"sample {number}: {array.shape[0]} patches do not fill the grid {grid}")
            num_tokens = t * h * w // layout.merge_size**2
            if (id(array), grid) not in first_row:
                first_row[id(array), grid] = num_rows
                num_rows += num_tokens
                patches.append(array)
                grids.append(grid)
            begin = first_row[id(array), grid]
            rows.append(np.arange(begin, begin + num_tokens))
    return _Images(tuple(patches), tuple(grids), np.concatenate(rows) if rows else np.empty(0, np.int64))
