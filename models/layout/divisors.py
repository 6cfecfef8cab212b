"""Does a count divide by the size of a parallel axis, and which sizes near it would do?"""

from __future__ import annotations


def check_divides(key: str, size: int, what: str, count: int) -> None:
    """Raise ValueError, with sizes that fit, where `count` of `what` do not divide by the `size` of `key`."""
    if count % size:
        raise ValueError(
            f"{key} is {size} and the model has {count} {what}, which do not divide by it; "
            f"choose {nearest(divisors(count), size)}"
        )


def divisors(count: int) -> list[int]:
    """Every size that `count` divides by, ascending."""
    return [n for n in range(1, count + 1) if count % n == 0]


def nearest(options: list[int], found: int) -> str:
    """Up to three of the options, those next to what was found: `2 or 4 or 8`."""
    return " or ".join(map(str, sorted(sorted(options, key=lambda n: abs(n - found))[:3])))
