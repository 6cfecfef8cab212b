"""Finds the best of an ordered list of choices: tries all if they are few, otherwise a coarse grid that is refined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Choice = TypeVar("Choice")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFound(Generic[Choice, Result]):
    """The outcome of a search."""

    choice: Choice
    result: Result
    num_tried: int
    is_exhaustive: bool


def find_best(
    choices: Sequence[Choice],
    run: Callable[[Choice], Result],
    cost: Callable[[Result], float],
    *,
    max_tries: int,
) -> BestFound[Choice, Result]:
    """Return the choice with the least cost among those tried; of equal ones the earlier.

    With more choices than tries, half of the tries go to an even grid, and the rest between the neighbours of the best
    so far. This is right for costs with one valley.
    """
    tried: dict[int, Result] = {}

    def attempt(place: int) -> None:
        if place not in tried:
            tried[place] = run(choices[place])

    if len(choices) <= max_tries:
        for place in range(len(choices)):
            attempt(place)
    else:
        num_grid = max(3, max_tries // 2)
        for k in range(num_grid):
            attempt(round(k * (len(choices) - 1) / (num_grid - 1)))
        while len(tried) < max_tries:
            best = min(tried, key=lambda place: (cost(tried[place]), place))
            below = max((place for place in tried if place < best), default=best)
            above = min((place for place in tried if place > best), default=best)
            wide = (best + above + 1) // 2 if above - best > best - below else (below + best) // 2
            if wide in tried:
                break
            attempt(wide)
    best = min(tried, key=lambda place: (cost(tried[place]), place))
    return BestFound(
        choice=choices[best], result=tried[best], num_tried=len(tried), is_exhaustive=len(tried) == len(choices)
    )
