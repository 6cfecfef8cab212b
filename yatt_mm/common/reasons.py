"""Counts why samples were set aside."""

from __future__ import annotations

import re
from collections import Counter

_OWN = re.compile(r"'[^']*'|/\S+|\d+")
"""What is the sample's own in a reason: names in quotes, paths and numbers."""


class Reasons:
    """Reasons, where those that differ only in names, paths and numbers count as the same."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of reasons that were added."""
        return self._counts.total()

    def add(self, reason: str) -> bool:
        """Add a reason, and return True if it is the first of its kind."""
        kind = _OWN.sub("", reason)
        self._counts[kind] += 1
        self._first.setdefault(kind, reason)
        return self._counts[kind] == 1

    def ranked(self) -> list[tuple[str, int]]:
        """Return (first reason, count) of each kind, the commonest first."""
        return [(self._first[kind], count) for kind, count in self._counts.most_common()]

    def commonest(self) -> tuple[str, int]:
        """Return the first reason of the commonest kind, and how many are of this kind. There must be one."""
        return self.ranked()[0]
