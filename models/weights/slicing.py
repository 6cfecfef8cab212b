"""How each kind of tensor is cut over ranks: which rows of a rank's parameter are which rows of a full tensor.

The same description is used in both directions: loading copies from the full tensors, and export copies into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Kind = Literal["rep", "col", "row", "vocab", "qkv", "gated"]
"""How a tensor is cut over ranks. rep: whole on every rank. col, row: cut along dim 0, 1. vocab: rows padded, cut along
dim 0. qkv: query, key and value interleaved by key/value group, cut along dim 0. gated: each half cut along dim 0,
then joined."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The numbers of the model that cutting depends on."""

    num_heads: int
    num_groups: int
    """The number of key/value heads."""
    vocab_size: int
    padded_vocab_size: int
    expert_ranks: int = 1
    """The number of expert-tensor-parallel ranks over which each expert is cut."""


class _Block(NamedTuple):
    """Rows of one full tensor. All blocks are concatenated and cut evenly over the ranks."""

    tensor: int
    begin: int
    length: int


def full_shapes(kind: Kind, shard: Shape, shapes: Shapes, num_ranks: int) -> list[Shape]:
    """Return the shapes of the Hugging Face tensors behind a parameter of which each rank holds a `shard`."""
    if kind == "rep":
        return [shard]
    if kind == "row":
        return [(shard[0], shard[1] * num_ranks, *shard[2:])]
    rows, rest = shard[0] * num_ranks, shard[1:]
    if kind == "col":
        return [(rows, *rest)]
    if kind == "vocab":
        return [(shapes.vocab_size, *rest)]
    if kind == "gated":
        return [(rows // 2, *rest)] * 2
    head = rows // (shapes.num_heads + 2 * shapes.num_groups)
    return [(count * head, *rest) for count in (shapes.num_heads, shapes.num_groups, shapes.num_groups)]


def common_parts(
    kind: Kind, shard: torch.Tensor, full: Sequence[torch.Tensor], shapes: Shapes, rank: int, num_ranks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (view of `shard`, view of a tensor of `full`) of equal shape, for all rows of a rank's parameter.

    Rows that pad a vocabulary are in no pair.
    """
    if kind == "rep":
        yield shard, full[0]
        return
    dim = 1 if kind == "row" else 0
    length = shard.shape[dim]
    first, at = rank * length, 0
    for block in _blocks(kind, [tensor.shape[dim] for tensor in full], shapes, num_ranks):
        begin, end = max(first, at), min(first + length, at + block.length)
        if begin < end:
            part = full[block.tensor].narrow(dim, block.begin + begin - at, end - begin)
            yield shard.narrow(dim, begin - first, end - begin), part
        at += block.length


def _blocks(kind: Kind, lengths: Sequence[int], shapes: Shapes, num_ranks: int) -> Iterator[_Block]:
    if kind == "qkv":
        for group in range(shapes.num_groups):
            for tensor, length in enumerate(lengths):
                yield _Block(tensor, group * length // shapes.num_groups, length // shapes.num_groups)
    elif kind == "gated":
        for rank in range(num_ranks):
            for tensor, length in enumerate(lengths):
                yield _Block(tensor, rank * length // num_ranks, length // num_ranks)
    else:
        yield _Block(0, 0, lengths[0])
