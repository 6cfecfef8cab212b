"""The choice of the objects to evict when the arena is full: old objects first, so that one free range becomes long
enough.

Pure functions over ranges of the arena.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

Range = tuple[int, int]
"""The start and end of a range in the arena."""
_Item = tuple[int, int, int]
"""The start, end, and place in the eviction order (-1 for a free range)."""


def choose_victims(free: Sequence[Range], evictable: Sequence[Range], fits: Callable[[int, int], bool]) -> list[int]:
    """Return indices into `evictable` (oldest first) of objects whose eviction makes room; an empty list if nothing can
    make room.

    The choice spares the youngest objects. Among equal choices it takes one that evicts few bytes.
    """
    items = sorted([(*span, -1) for span in free] + [(*span, rank) for rank, span in enumerate(evictable)])

    def is_enough(num_oldest: int) -> bool:
        return any(fits(run[0][0], run[-1][1]) for run in _runs(items, num_oldest))

    num_oldest = bisect_left(range(len(evictable) + 1), True, key=is_enough)
    if num_oldest > len(evictable):
        return []
    windows = (window for run in _runs(items, num_oldest) for window in _windows(run, fits))
    best = min(windows, key=lambda window: sum(end - start for start, end, rank in window if rank >= 0))
    return [rank for _, _, rank in best if rank >= 0]


def _runs(items: Sequence[_Item], num_oldest: int) -> Iterator[list[_Item]]:
    """Yield runs of neighbours without a gap, of free ranges and of the `num_oldest` oldest objects."""
    run: list[_Item] = []
    for item in items:
        if item[2] >= num_oldest:
            continue
        if run and run[-1][1] != item[0]:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _windows(run: Sequence[_Item], fits: Callable[[int, int], bool]) -> Iterator[Sequence[_Item]]:
    """Yield the parts of a run that are long enough, but would be too short without their first item."""
    first = 0
    for last in range(len(run)):
        while first < last and fits(run[first + 1][0], run[last][1]):
            first += 1
        if fits(run[first][0], run[last][1]):
            yield run[first : last + 1]
