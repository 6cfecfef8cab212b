"""A reward that a model with random weights gets now and then, so that its groups have a signal to learn from."""

import time
from collections.abc import Mapping
from typing import Any


def even_length(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """1 for an even number of characters; an exception on an empty response, to be scored 0."""
    if not response:
        raise ValueError("nothing to judge")
    return float(len(response) % 2 == 0)


def not_a_number(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """What dividing by nothing gives."""
    return float("nan")


def endless(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Waits for something that never comes."""
    while True:
        time.sleep(0.01)
