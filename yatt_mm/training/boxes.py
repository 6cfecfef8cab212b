"""Rectangular parts of tensors, by which ranks of one layout find what ranks of another layout have saved.

A rank of the distributed optimizer owns a stretch of a parameter: elements that follow each other in memory. `stretch`
divides it into boxes, which have a place in the whole tensor. Boxes of two layouts overlap in boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Index = tuple[int, ...]
"""One number for each axis of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor."""

    offset: Index
    """The place of its first element in the tensor."""
    shape: Index

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that has the elements of `outer`."""
        starts = [mine - its for mine, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return what both boxes have in common; None if that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends))
        return Box(offset=offset, shape=shape) if all(length > 0 for length in shape) else None


def stretch(shape: Index, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield the elements `start` to `stop` of a tensor in memory order as (number of elements before it, box). The
    elements of each box follow each other in memory."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield 0, Box(offset=(start,) * len(shape), shape=(stop - start,) * len(shape))
        return
    per_row = math.prod(shape[1:])
    first, last = start // per_row, (stop - 1) // per_row
    if first == last and stop - start < per_row:
        for before, box in stretch(shape[1:], start - first * per_row, stop - first * per_row):
            yield before, Box(offset=(first, *box.offset), shape=(1, *box.shape))
        return
    # the rest of the first row, whole rows, the beginning of the last one
    whole_start, whole_stop = -(-start // per_row), stop // per_row
    if start < whole_start * per_row:
        yield from stretch(shape, start, whole_start * per_row)
    if whole_start < whole_stop:
        offset, rows = (whole_start, *(0 for _ in shape[1:])), whole_stop - whole_start
        yield whole_start * per_row - start, Box(offset=offset, shape=(rows, *shape[1:]))
    if whole_stop * per_row < stop:
        for before, box in stretch(shape, whole_stop * per_row, stop):
            yield whole_stop * per_row - start + before, box
