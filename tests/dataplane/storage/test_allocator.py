"""Tests that slabs never overlap and are aligned, and that freed slabs merge again."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.storage.allocator import Allocator, slab_bytes

CAPACITY = 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=80))
def test_places_are_aligned_disjoint_and_merge_when_freed(steps: list[tuple[int, bool]]) -> None:
    allocator = Allocator(CAPACITY)
    live: list[tuple[int, int]] = []
    for nbytes, free_one in steps:
        if free_one and live:
            allocator.free(*live.pop(nbytes % len(live)))
            continue
        offset = allocator.allocate(nbytes)
        if offset is None:
            continue
        assert offset % (4096 if nbytes >= 64 * 1024 else 64) == 0
        live.append((offset, nbytes))
        ends = sorted((start, start + slab_bytes(size)) for start, size in live)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        assert ends[-1][1] <= CAPACITY
    assert allocator.used_bytes == sum(slab_bytes(size) for _, size in live)
    for place in live:
        allocator.free(*place)
    assert (allocator.used_bytes, allocator.largest_free_bytes) == (0, CAPACITY)


def test_a_request_that_does_not_fit_gets_none() -> None:
    allocator = Allocator(CAPACITY)
    assert allocator.allocate(CAPACITY) == 0
    assert allocator.allocate(1) is None
