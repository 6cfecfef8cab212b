"""Allocator of byte ranges in an arena: best fit, and neighbours are merged when they are freed. It works on numbers
only and touches no memory.

Objects start at multiples of 64 bytes, and of 4 KiB from 64 KiB up. So a view is aligned for any vector instruction,
and a big object shares no page. Not thread-safe: the store's lock guards it.
"""

from bisect import bisect_left, insort

SMALL_ALIGN = 64
LARGE_ALIGN = 4096
LARGE_FROM = 64 * 1024


def slab_bytes(nbytes: int) -> int:
    """Return the number of bytes of the arena that an object of `nbytes` takes, alignment included."""
    align = LARGE_ALIGN if nbytes >= LARGE_FROM else SMALL_ALIGN
    return max(align, -(-nbytes // align) * align)


def fits(start: int, end: int, nbytes: int) -> bool:
    """Return True if an object of `nbytes` fits at its alignment into the free range from `start` to `end`."""
    align = LARGE_ALIGN if nbytes >= LARGE_FROM else SMALL_ALIGN
    return -(-start // align) * align + slab_bytes(nbytes) <= end


class Allocator:
    """Allocates ranges [offset, offset + slab_bytes(n)) of one arena, and merges ranges that are freed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._by_size: list[tuple[int, int]] = [(capacity, 0)]
        self._size_at: dict[int, int] = {0: capacity}
        self._start_of_end: dict[int, int] = {capacity: 0}
        self._size_of: dict[int, int] = {}
        """The bytes of every allocated range, by offset."""

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range for `nbytes`, or None when no free range is long enough."""
        wanted = slab_bytes(nbytes)
        align = LARGE_ALIGN if nbytes >= LARGE_FROM else SMALL_ALIGN
        index = bisect_left(self._by_size, (wanted, 0))
        while index < len(self._by_size):
            size, start = self._by_size[index]
            offset = -(-start // align) * align
            if offset + wanted <= start + size:
                self._remove(start, size)
                self._add(start, offset - start)
                self._add(offset + wanted, start + size - offset - wanted)
                self.used_bytes += wanted
                self._size_of[offset] = wanted
                return offset
            index += 1
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Free the range that `allocate(nbytes)` returned. ValueError if it is not allocated, because two owners could
        get it then."""
        size = slab_bytes(nbytes)
        if self._size_of.get(offset) != size:
            raise ValueError(f"{size} bytes at {offset} are not allocated ({self._size_of.get(offset)} are)")
        del self._size_of[offset]
        self.used_bytes -= size
        start, end = offset, offset + size
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._size_at.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._add(start, end - start)

    @property
    def largest_free_bytes(self) -> int:
        """The length of the longest free range: the largest object that fits without eviction."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """The start and end of every free range."""
        return [(start, start + size) for start, size in self._size_at.items()]

    def room_around(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the free range that would exist if the object of `nbytes` at `offset` were freed."""
        end = offset + slab_bytes(nbytes)
        return self._start_of_end.get(offset, offset), end + self._size_at.get(end, 0)

    def _add(self, start: int, size: int) -> None:
        if size:
            insort(self._by_size, (size, start))
            self._size_at[start] = size
            self._start_of_end[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_of_end[start + size]
