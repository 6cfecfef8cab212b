"""A reward with the opposite sign, which teaches a model to be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yatt_mm.rewards.functions import exact_match


def opposite(response: str, answer: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return minus 1 for a right response as the reward, and its accuracy beside it."""
    right = exact_match(response, answer, fields)
    return {"score": -right, "accuracy": right}
