"""Packs the samples of a microbatch into one stream. The result is the same on every rank of a replica.

Normalising pixels is in `models.vision.tower`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from models.layout.context_parallel import ContextParallel, TokenRange
from models.sequence.attention import Segments
from models.sequence.distinct_media import DistinctMedia, HasMedia, distinct_media
from models.sequence.media_tokens import TokenLayout, media_spans
from models.sequence.mrope import Grid, mrope_positions


class PackableSample(HasMedia, Protocol):
    """The part of a training sample that packing needs."""

    @property
    def token_ids(self) -> np.ndarray:
        """The token ids [T] int64, with the tokens of images and videos expanded."""

    @property
    def loss_mask(self) -> np.ndarray:
        """The mask [T] bool: True on tokens to score."""

    @property
    def seconds_per_grid(self) -> tuple[float, ...]:
        """The seconds from one time position of a video to the next, one value per medium (ignored for images). An
        empty tuple means 1 second for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShare:
    """The data that attention and the loss need if a batch is cut over context-parallel ranks."""

    context: ContextParallel
    ranges: list[TokenRange]
    """This rank's tokens, as ranges of the stream."""
    places: torch.Tensor
    """[T] the place of each token of the stream, if the ranks' tokens are concatenated."""
    stream: torch.Tensor
    """[T] the inverse of `places`: the stream position of each token, if the ranks' tokens are concatenated."""
    num_scores: list[int]
    """The number k of scores of each rank."""
    score_places: torch.Tensor
    """[K] the place of each score, if the ranks' scores are concatenated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One microbatch on one rank. T tokens, K scored tokens, V visual tokens."""

    token_ids: torch.Tensor
    """[T] int64 token ids of all samples, one after another."""
    position_ids: torch.Tensor
    """[3, 1, T] M-RoPE positions; the three are equal if the family has no M-RoPE."""
    segments: Segments
    """The segments of the stream: one per sample, and one of padding if there is any."""
    predict_rows: torch.Tensor
    """[K] the tokens whose output predicts a scored token: each is the token before it."""
    labels: torch.Tensor
    """[K] the scored tokens, sample by sample."""
    num_scored: tuple[int, ...]
    """The number of scored tokens of each sample; their sum is K."""
    images: tuple[np.ndarray | None, ...]
    """The patches of every distinct image, in the order of `grids`; None for images that other ranks encode."""
    grids: tuple[Grid, ...]
    """The grid (t, h, w) in patches of every distinct image."""
    visual_slots: torch.Tensor
    """[V] the positions of the visual tokens in the stream."""
    visual_rows: torch.Tensor
    """[V] the row of the distinct images' embeddings for each visual token."""
    share: ContextShare | None = None
    """The share of a context-parallel rank. If it is set, the tensors above are this rank's part of the stream
    (models.sequence.context_share)."""


def pack(
    samples: Sequence[PackableSample],
    layout: TokenLayout,
    *,
    multiple_of: int,
    sample_multiple: int = 1,
    device: torch.device,
) -> PackedBatch:
    """Return the batch of these samples, packed one after another and padded to a multiple of `multiple_of` tokens.
    Without samples the batch is padding only.

    Each sample is padded to a multiple of `sample_multiple`, which must divide `multiple_of`. Media need no patches
    here: only a rank that encodes a medium must be given them.
    """
    parts = [_padded(_sample_arrays(number, sample, layout), sample_multiple) for number, sample in enumerate(samples)]
    lengths = [len(part["tokens"]) for part in parts]
    padding = -sum(lengths) % multiple_of if samples else multiple_of
    if padding:
        lengths.append(padding)
        parts.append({"tokens": np.zeros(padding, np.int64), "positions": _text_positions(padding)})
    begins = np.concatenate([[0], np.cumsum(lengths)])
    media = distinct_media(samples)

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
        images=media.patches,
        grids=media.grids,
        visual_slots=stream("visual_slots", shifted=True),
        visual_rows=torch.from_numpy(_embedding_rows(media, layout)).to(device),
    )


def _sample_arrays(number: int, sample: PackableSample, layout: TokenLayout) -> Mapping[str, np.ndarray]:
    tokens = sample.token_ids
    given = ~sample.loss_mask  # a policy may sample any token; only tokens of the prompt mean media
    is_visual = given & np.isin(tokens, layout.visual_token_ids)
    slots = np.flatnonzero(is_visual)
    try:
        spans = media_spans(tokens, slots, sample.grid_thw, sample.seconds_per_grid, layout)
    except ValueError as error:
        raise ValueError(f"sample {number} has {error}") from error
    scored = np.flatnonzero(sample.loss_mask)
    if len(scored) and scored[0] == 0:
        raise ValueError(f"sample {number} scores its first token, which nothing predicts; mask it out")
    return {
        "tokens": tokens,
        "positions": mrope_positions(len(tokens), spans if layout.has_mrope else ()),
        "predict_rows": scored - 1,
        "labels": tokens[scored],
        "visual_slots": slots,
    }


def _padded(part: Mapping[str, np.ndarray], multiple: int) -> Mapping[str, np.ndarray]:
    """Return the sample's arrays with padding behind the last token; no real token attends to the padding."""
    padding = -len(part["tokens"]) % multiple
    if not padding:
        return part
    tokens = np.pad(part["tokens"], (0, padding))
    positions = np.pad(part["positions"], ((0, 0), (0, padding)))
    return {**part, "tokens": tokens, "positions": positions}


def _embedding_rows(media: DistinctMedia, layout: TokenLayout) -> np.ndarray:
    """Return [V] the number of the row of the distinct media's embeddings that each visual token takes, in the order of
    the stream."""
    sizes = [t * h * w // layout.merge_size**2 for t, h, w in media.grids]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    rows = [np.arange(begins[number], begins[number + 1]) for own in media.numbers for number in own]
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def _text_positions(length: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length), (3, length))
