"""Context parallelism as index arithmetic: which tokens of a packed stream each rank holds. Nothing is sent here.

Every rank packs the whole stream, then keeps its share of it. In the contiguous order a share is a slice of the
stream; in the zigzag order it is, of each sequence, the chunks `rank` and `2 * size - 1 - rank` out of `2 * size`, so
that causal attention costs every rank the same (Llama 3, arXiv 2407.21783, section 3.3.2).

T tokens of the stream, t = T / size tokens of a rank, in the stream's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from models.layout.parallel import Comm, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """The settings of context parallelism for one rank: how a packed stream is cut over its group."""

    size: int = 1
    rank: int = 0
    order: Order = "contiguous"
    comm: Comm = "a2a"

    @property
    def sample_multiple(self) -> int:
        """The number to a multiple of which each sample's tokens are padded."""
        return 2 * self.size if self.size > 1 and self.order == "zigzag" else 1

    def stream_multiple(self, rank_multiple: int) -> int:
        """Return the number of tokens to a multiple of which the stream is padded, so that each rank holds a multiple
        of `rank_multiple`."""
        return math.lcm(self.sample_multiple, self.size * rank_multiple)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Neighbouring tokens of one sequence that a rank holds."""

    first: int
    """The first token of the range's sequence, as a position in the stream. It is the first key of the range."""
    begin: int
    """The first token of the range, as a position in the stream."""
    end: int
    """The end of the range, as a position in the stream: behind its last token, which is also the last key of the
    range."""


def ranges_of(bounds: Sequence[int], context: ContextParallel) -> list[TokenRange]:
    """Return the ranges of this rank, in order. `bounds`: 0, the end of the first sequence, ..., T."""
    return [one for first, end in pairwise(bounds) for one in _ranges_of_sequence(first, end, bounds[-1], context)]


def tokens_of(bounds: Sequence[int], context: ContextParallel) -> np.ndarray:
    """Return [t] the positions in the stream of the tokens that this rank holds."""
    return np.concatenate([np.arange(one.begin, one.end) for one in ranges_of(bounds, context)])


def places(bounds: Sequence[int], context: ContextParallel) -> np.ndarray:
    """Return [T] the place of each token if the shares of all ranks are concatenated: `rank * t + place in its
    share`."""
    shares = [
        tokens_of(bounds, ContextParallel(size=context.size, rank=rank, order=context.order))
        for rank in range(context.size)
    ]
    return np.argsort(np.concatenate(shares))


def _ranges_of_sequence(first: int, end: int, num_tokens: int, context: ContextParallel) -> list[TokenRange]:
    size, rank = context.size, context.rank
    if context.order == "contiguous" or size == 1:
        share = num_tokens // size
        held = [(max(first, rank * share), min(end, (rank + 1) * share))]
    else:
        chunk = (end - first) // (2 * size)
        held = [(first + number * chunk, first + (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank)]
    return [TokenRange(first, begin, stop) for begin, stop in held if begin < stop]
