"""megatron's core attention for packed streams: causal inside each sequence, on one rank or cut over several.

Under context parallelism a rank holds some tokens of every stream (`models.sequence.context_share`). Two ways lead to
their attention: `a2a` gives each rank all tokens of some heads and back again; `allgather` gives it all keys and
values.

T tokens of the stream, t of this rank, H query heads, G key/value heads, D head size, R context-parallel ranks.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.compat.megatron_core import (
    AttnMaskType,
    MegatronModule,
    PackedSeqParams,
    ProcessGroupCollection,
    TransformerConfig,
    parallel_state,
    tensor_parallel,
)
from models.layout.context_parallel import TokenRange
from models.sequence.attention import Segments, packed_attention, varlen_attention
from models.sequence.packing import ContextShare


class PackedParams(PackedSeqParams):
    """The values that megatron passes through to core attention.

    `qkv_format` stays sbhd with a batch of one: megatron then applies RoPE element by element, with frequencies that
    are already right for each token, and only core attention uses the segments.
    """

    segments: Segments
    share: ContextShare | None

    @classmethod
    def of(cls, segments: Segments, share: ContextShare | None) -> PackedParams:
        """Return the parameters of one packed stream; `share` is the part of it that this rank holds."""
        params = cls(qkv_format="sbhd")
        params.segments, params.share = segments, share
        return params


class PackedCoreAttention(MegatronModule):
    """Attention over packed sequences, as the core attention of megatron's layers."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.causal
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> torch.Tensor:
        """Return [t, 1, H * D] from query [t, 1, H, D] and key, value [t, 1, G, D]."""
        assert packed_seq_params is not None
        segments, share = packed_seq_params.segments, packed_seq_params.share
        q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
        if share is None:
            out = packed_attention(q, k, v, segments, scale=self.scale, causal=True)
        elif share.context.comm == "a2a":
            out = _by_heads(q, k, v, segments, share, self.scale)
        else:
            out = _by_keys(q, k, v, share, self.scale)
        return out.reshape(query.shape[0], 1, -1)


def _by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, share: ContextShare, scale: float
) -> torch.Tensor:
    """Return [t, H, D], the attention of this rank's tokens. Each of the R ranks computes H / R heads over the whole
    stream; key/value heads are repeated to fit R."""
    size, group = share.context.size, parallel_state.get_context_parallel_group()
    num_groups = key.shape[1]
    assert query.shape[1] % size == 0, "check_layout lets no such layout through"
    repeats = math.lcm(num_groups, size) // num_groups
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    by_rank = [tensor.unflatten(1, (size, -1)) for tensor in (query, key, value)]
    sent = torch.cat(by_rank, 2).transpose(0, 1).flatten(0, 1)
    received = tensor_parallel.all_to_all(group, sent).index_select(0, share.places)
    q, k, v = received.split([part.shape[2] for part in by_rank], 1)
    out = packed_attention(q, k, v, segments, scale=scale, causal=True).index_select(0, share.stream)
    returned: torch.Tensor = tensor_parallel.all_to_all(group, out)
    return returned.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _by_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: ContextShare, scale: float
) -> torch.Tensor:
    """Return [t, H, D]. Every rank computes all heads of its own tokens, over the keys before them."""
    group = parallel_state.get_context_parallel_group()
    both = _gather_tokens(torch.cat((key, value), 1), group).index_select(0, share.places)
    k, v = both.chunk(2, 1)
    return prefix_attention(query, k, v, share.ranges, scale=scale)


def _gather_tokens(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return [T, ...] from each rank's [t, ...]. Backward sums every rank's part of the gradient."""
    gathered: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return gathered


def prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranges: list[TokenRange], *, scale: float
) -> torch.Tensor:
    """Return [t, H, D] attention of ranges of tokens over their sequences up to themselves. key, value: [T, G, D]."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        keys, values = (torch.cat([tensor[one.first : one.end] for one in ranges]) for tensor in (key, value))
        of_queries = _bounds([one.end - one.begin for one in ranges], query.device)
        of_keys = _bounds([one.end - one.first for one in ranges], query.device)
        return varlen_attention(query, keys, values, of_queries, of_keys, scale, causal=True)
    lengths = [one.end - one.begin for one in ranges]
    parts = zip(ranges, query.split(lengths), strict=True)
    return torch.cat(
        [_attend_range(q, key[one.first : one.end], value[one.first : one.end], scale) for one, q in parts]
    )


def _attend_range(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [n, H, D] attention of the last n tokens of a sequence, given the keys of the whole sequence."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    num_queries, num_keys = len(query), len(key)
    if num_queries == num_keys:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _bounds(lengths: list[int], device: torch.device) -> Segments:
    return Segments([0, *accumulate(lengths)], device)
