"""Attention inside packed sequences: one function for the decoder (causal) and the vision tower (not causal).

CUDA runs one variable-length kernel. The CPU makes one scaled_dot_product_attention call per distinct segment length,
so that hundreds of short segments need only a few calls. No mask is ever built. Context parallelism is in
`models.decoder.core_attention`.

T tokens of all segments, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


class Segments:
    """The boundaries of the sequences in a packed stream."""

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        """`bounds` are the positions of the boundaries: 0, the end of the first sequence, ..., the number of tokens."""
        self.bounds = tuple(bounds)
        self.device = device
        self.max_length = max(end - begin for begin, end in pairwise(bounds))

    @cached_property
    def cumulative(self) -> torch.Tensor:
        """The [num_segments + 1] int32 boundaries on the device."""
        return torch.tensor(self.bounds, dtype=torch.int32, device=self.device)

    @cached_property
    def by_length(self) -> list[tuple[int, list[int]]]:
        """Pairs (length, begins of the sequences of that length), in order of first appearance."""
        groups: dict[int, list[int]] = {}
        for begin, end in pairwise(self.bounds):
            groups.setdefault(end - begin, []).append(begin)
        groups.pop(0, None)
        return list(groups.items())

    @cached_property
    def indices(self) -> list[torch.Tensor]:
        """The token positions of each group of `by_length`, segment by segment."""
        return [
            (torch.tensor(begins, device=self.device)[:, None] + torch.arange(length, device=self.device)).flatten()
            for length, begins in self.by_length
        ]

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The place [T] of each token of the stream in the concatenation of `indices`."""
        return torch.argsort(torch.cat(self.indices))


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, *, scale: float, causal: bool
) -> torch.Tensor:
    """Return [T, H, D] attention of each token over its own segment. `key` and `value` may have fewer heads (GQA)."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return varlen_attention(query, key, value, segments, segments, scale, causal)
    if len(segments.by_length) == 1:
        return _equal_lengths(query, key, value, segments.by_length[0][0], scale, causal)
    parts = [
        _equal_lengths(query[index], key[index], value[index], length, scale, causal)
        for (length, _), index in zip(segments.by_length, segments.indices)
    ]
    return torch.cat(parts).index_select(0, segments.inverse)


def _equal_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scale: float, causal: bool
) -> torch.Tensor:
    q, k, v = (states.view(-1, length, *states.shape[1:]).transpose(1, 2) for states in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(query.shape[0], query.shape[1], -1)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_queries: Segments,
    of_keys: Segments,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Return [T, H, D] attention in half precision on CUDA, by one kernel. Causal: a segment's queries are the last of
    its keys."""
    bounds = (of_queries.cumulative, of_keys.cumulative, of_queries.max_length, of_keys.max_length)
    if flash_attn_varlen_func is not None:
        out: torch.Tensor = flash_attn_varlen_func(query, key, value, *bounds, softmax_scale=scale, causal=causal)
        return out
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    gqa = query.shape[1] != key.shape[1]
    attended = varlen_attn(query, key, value, *bounds, scale=scale, window_size=window, enable_gqa=gqa)
    assert isinstance(attended, torch.Tensor)
    return attended


def vision_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for transformers with packed inputs: query [1, H, T, D] -> ([1, T, H, D], None)."""
    segments = Segments(cu_seq_lens_q.tolist(), query.device)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return packed_attention(q, k, v, segments, scale=scaling, causal=False).unsqueeze(0), None
