"""Reads what a reward function returned: a number, or parts with names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from yatt_mm.protocol.faults import MAX_SHOWN

TOTALS = ("overall", "score")
"""Names of a part that is the reward itself, as EasyR1 and verl call it. The other parts are then only shown, and those
that are no numbers left out."""
ANSWERS = ("answer", "pred")
"""Names of a part that is a text: the answer that the function read in the response; `pred` is verl's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a response got."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts, before their ranges and weights; none if the function returns a number."""
    answer: str | None = None
    """The answer that the function read in the response; None if it does not say."""


def read_reward(
    given: Any, weights: Mapping[str, float], ranges: Mapping[str, tuple[float, float]] | None = None
) -> Reward:
    """Return the reward in what a function returned. `weights`: those of named parts; others have 1. `ranges`: the
    lowest and the highest value that counts of named parts.

    Raises ValueError that says what was returned instead.
    """
    if not isinstance(given, Mapping):
        return Reward(value=_number(given, given))
    has_total = any(name in given for name in TOTALS)
    parts = {
        str(name): _number(part, given)
        for name, part in given.items()
        if name not in ANSWERS and not (has_total and not isinstance(part, SupportsFloat))
    }
    if not parts:
        raise _wrong(given)
    answer = next((str(given[name]) for name in ANSWERS if given.get(name) is not None), None)
    counted = {name: _within(part, (ranges or {}).get(name)) for name, part in parts.items()}
    of_total = next((name for name in TOTALS if name in parts), None)
    if of_total is None:
        total = sum(weights.get(name, 1.0) * part for name, part in counted.items())
    else:
        total = counted[of_total]
        del parts[of_total]
    return Reward(value=total, parts=parts, answer=answer)


def _within(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def _number(value: Any, given: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(given)
    return number


def _wrong(given: Any) -> ValueError:
    return ValueError(
        f"it returned {repr(given)[:MAX_SHOWN]}, a {type(given).__name__}; wanted a finite number, or a dictionary of "
        "finite numbers"
    )
