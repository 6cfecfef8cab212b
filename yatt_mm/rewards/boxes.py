"""Boxes and points in texts, and how well boxes match."""

from __future__ import annotations

import re
from collections.abc import Sequence

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2: two opposite corners."""

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BETWEEN = r"(?:,|\)\s*,\s*\()"
_BOX = re.compile(r"[\[(]" + _NUMBER + "," + _NUMBER + _BETWEEN + _NUMBER + "," + _NUMBER + r"[\])]")
_POINT = re.compile(_NUMBER + "," + _NUMBER)


def find_boxes(text: str) -> list[Box]:
    """Return the boxes in a text: four numbers in brackets, `[10, 20, 30, 40]`, or two points, `(10, 20), (30, 40)`."""
    return [_sorted(*map(float, numbers)) for numbers in _BOX.findall(text)]


def find_points(text: str) -> list[tuple[float, float]]:
    """Return the points in a text: two numbers with a comma between them."""
    return [(float(x), float(y)) for x, y in _POINT.findall(text)]


def mean_iou(found: Sequence[Box], wanted: Sequence[Box]) -> float:
    """Return how well two lists of boxes match, from 0 to 1."""
    pairs = sorted(
        ((iou(one, other), i, j) for i, one in enumerate(found) for j, other in enumerate(wanted)),
        key=lambda pair: (-pair[0], pair[1:]),
    )
    total, left_i, left_j = 0.0, set(range(len(found))), set(range(len(wanted)))
    for value, i, j in pairs:
        if i in left_i and j in left_j:
            total += value
            left_i.discard(i)
            left_j.discard(j)
    return total / max(len(found), len(wanted), 1)


def iou(one: Box, other: Box) -> float:
    """Return the area that two boxes share over the area that they cover, from 0 to 1."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    covered = _area(one) + _area(other) - shared
    return shared / covered if covered else 0.0


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _sorted(x1: float, y1: float, x2: float, y2: float) -> Box:
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
