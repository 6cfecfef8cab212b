"""Tests of context parallelism without communication: which rank holds which tokens, and attention of a part of the
queries."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoder.core_attention import prefix_attention
from models.layout.context_parallel import ContextParallel, places, ranges_of, tokens_of
from models.layout.parallel import Order
from models.sequence.attention import Segments, packed_attention

CPU = torch.device("cpu")
ORDERS: list[Order] = ["contiguous", "zigzag"]


def group_of(size: int, order: Order) -> list[ContextParallel]:
    return [ContextParallel(size=size, rank=rank, order=order) for rank in range(size)]


def padded_bounds(lengths: list[int], context: ContextParallel, rank_multiple: int = 1) -> list[int]:
    """Return the bounds of packed sequences, in the form that packing gives."""
    lengths = [length + -length % context.sample_multiple for length in lengths]
    padding = -sum(lengths) % context.stream_multiple(rank_multiple)
    return [0, *accumulate([*lengths, padding] if padding else lengths)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from(ORDERS),
    st.integers(1, 4),
)
def test_every_token_is_held_once_and_every_rank_holds_as_many(
    lengths: list[int], size: int, order: Order, rank_multiple: int
) -> None:
    group = group_of(size, order)
    bounds = padded_bounds(lengths, group[0], rank_multiple)
    shares = [tokens_of(bounds, context) for context in group]
    assert sorted(np.concatenate(shares)) == list(range(bounds[-1]))
    assert {len(share) for share in shares} == {bounds[-1] // size}
    assert bounds[-1] // size % rank_multiple == 0
    place = places(bounds, group[0])
    for rank, share in enumerate(shares):
        assert place[share].tolist() == list(range(rank * len(share), (rank + 1) * len(share)))


def test_the_zigzag_order_by_hand() -> None:
    assert [tokens_of([0, 8, 12], context).tolist() for context in group_of(2, "zigzag")] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]


@given(st.lists(st.integers(8, 64), min_size=1, max_size=5), st.integers(2, 4))
def test_in_the_zigzag_order_causal_attention_costs_every_rank_the_same(lengths: list[int], size: int) -> None:
    group = group_of(size, "zigzag")
    bounds = padded_bounds(lengths, group[0])
    pairs = [
        sum(sum(range(one.begin - one.first + 1, one.end - one.first + 1)) for one in ranges_of(bounds, context))
        for context in group
    ]
    assert max(pairs) == min(pairs)


@pytest.mark.parametrize("order", ORDERS)
def test_attention_of_a_share_equals_its_part_of_the_whole(order: Order) -> None:
    group = group_of(2, order)
    bounds = padded_bounds([5, 9, 2, 7], group[0])
    query, key, value = (torch.randn(bounds[-1], heads, 8) for heads in (4, 2, 2))
    whole = packed_attention(query, key, value, Segments(bounds, CPU), scale=0.3, causal=True)
    for context in group:
        tokens = torch.from_numpy(tokens_of(bounds, context))
        ranges = ranges_of(bounds, context)
        assert all(begin.end <= end.begin for begin, end in pairwise(ranges))
        found = prefix_attention(query[tokens], key, value, ranges, scale=0.3)
        assert torch.allclose(found, whole[tokens], atol=1e-6)
