"""A reward that a model with random weights gets now and then, so that its groups have a signal to learn from."""

from collections.abc import Mapping
from typing import Any


def even_length(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """1 for an even number of characters; an exception on an empty response, to be scored 0."""
    if not response:
        raise ValueError("nothing to judge")
    return float(len(response) % 2 == 0)
