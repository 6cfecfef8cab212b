"""Splits numbers into parts of nearly equal sums with the largest differencing method. Pure arithmetic, no torch.

Karmarkar and Karp, "The differencing method of set partitioning" (1982), for any number of parts. Integers only, so
that every process gets the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

SINGLES_PER_PART = 16
"""The number of smallest numbers per part that are differenced. Larger numbers are dealt out first, which is far
quicker, and the smallest ones can still even out what is left."""


def largest_differencing(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Return [part] ascending indices into `costs`; parts may be empty.

    It starts with one partial partition for each number. Then it repeatedly merges the two partitions whose sums differ
    most: the largest sum of one joins the smallest sum of the other. If there are very many numbers, the largest are
    first dealt out into one partition (`SINGLES_PER_PART`).
    """
    if not costs:
        return [[] for _ in range(num_parts)]
    unit = (sum(costs) >> 62) + 1  # sums must fit 63 bits
    costs = [cost // unit for cost in costs]
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    num_dealt = max(0, len(costs) - SINGLES_PER_PART * num_parts)
    # per partial partition that was not merged yet: the members of each of its sums, the largest sum first
    leaves = [[[i]] for i in order[num_dealt:]]
    if num_dealt:
        leaves.append(_deal(order[:num_dealt], costs, num_parts))
    sums = [np.array([sum(costs[i] for i in slot) for slot in leaf], dtype=np.int64) for leaf in leaves]
    merged: list[tuple[int, int, np.ndarray]] = []
    heap = [(-_spread(values, num_parts), node) for node, values in enumerate(sums)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        together, before = _merge(sums[first], sums[second], num_parts)
        sums.append(together)
        merged.append((first, second, before))
        heapq.heappush(heap, (-_spread(together, num_parts), len(sums) - 1))
    return _read_parts(leaves, sums, merged, num_parts)


def _deal(order: Sequence[int], costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Give each number to the part with the least so far; return the fullest part first."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for i in order:
        load, part = heap[0]
        parts[part].append(i)
        heapq.heapreplace(heap, (load + costs[i], part))
    return [parts[part] for _, part in sorted(heap, reverse=True)]


def _spread(sums: np.ndarray, num_parts: int) -> int:
    """Return the largest sum minus the smallest; sums that are left out are 0."""
    return int(sums[0] - (sums[-1] if len(sums) == num_parts else 0))


def _merge(first: np.ndarray, second: np.ndarray, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Join two partitions, given as sums in descending order: the largest of one goes with the smallest of the other.
    Return (the new sums in descending order, the place of each before it was sorted)."""
    length = min(num_parts, len(first) + len(second))
    together = np.zeros(length, dtype=np.int64)
    together[: len(first)] = first
    together[length - len(second) :] += second[::-1]
    order = np.argsort(-together, kind="stable")
    return together[order], order


def _read_parts(
    leaves: list[list[list[int]]], sums: list[np.ndarray], merged: list[tuple[int, int, np.ndarray]], num_parts: int
) -> list[list[int]]:
    """Return which part each number ended in, from the last merge back to the first."""
    parts: dict[int, np.ndarray] = {len(sums) - 1: np.arange(len(sums[-1]))}
    for node in range(len(sums) - 1, len(leaves) - 1, -1):
        first, second, order = merged[node - len(leaves)]
        part = np.empty_like(order)
        part[order] = parts.pop(node)
        parts[first] = part[: len(sums[first])]
        parts[second] = part[len(part) - len(sums[second]) :][::-1]
    found: list[list[int]] = [[] for _ in range(num_parts)]
    for node, leaf in enumerate(leaves):
        for slot, members in enumerate(leaf):
            found[int(parts[node][slot])] += members
    return [sorted(part) for part in found]
