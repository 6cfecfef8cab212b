"""Checks that a count divides by the size of a parallel axis, and suggests sizes that fit."""

from __future__ import annotations


def check_divides(key: str, size: int, what: str, count: int) -> None:
    """Raise ValueError, which names sizes that fit, if the number `count` of `what` is not a multiple of `size`, the
    value of `key`."""
    if count % size:
        raise ValueError(
            f"{key} is {size} and the model has {count} {what}, which do not divide by it; "
            f"choose {nearest(divisors(count), size)}"
        )


def divisors(count: int) -> list[int]:
    """Return every number that divides `count`, ascending."""
    return [n for n in range(1, count + 1) if count % n == 0]


def nearest(options: list[int], found: int) -> str:
    """Return up to three of the options, nearest to what was found: `2 or 4 or 8`."""
    return " or ".join(map(str, sorted(sorted(options, key=lambda n: abs(n - found))[:3])))
