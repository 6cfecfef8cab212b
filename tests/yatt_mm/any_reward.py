"""A reward function that gives a model with random weights a score now and then, so that some of its groups have
signal."""

import time
from collections.abc import Mapping
from typing import Any

from yatt_mm.rewards.functions import exact_match


def even_length(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1 for an even number of characters, 0 for an odd one. Raises an exception on an empty response, which the
    caller scores 0."""
    if not response:
        raise ValueError("nothing to judge")
    return float(len(response) % 2 == 0)


def wrong_answer(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 0 for the right answer and 1 for any other response, the opposite of `exact_match`."""
    return 1 - exact_match(response, answer, fields)


def not_a_number(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Raise ZeroDivisionError, like a reward function with a fault."""
    return float("nan")


def endless(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Wait without end, like a reward function that hangs."""
    while True:
        time.sleep(0.01)


def gives_a_pair(response: str, answer: str, fields: Mapping[str, Any]) -> Any:
    return 1.0, "right"


def gives_nothing(response: str, answer: str, fields: Mapping[str, Any]) -> Any:
    return None


def gives_a_dict(response: str, answer: str, fields: Mapping[str, Any]) -> Any:
    return {}


def takes_a_field_away(response: str, answer: str, fields: dict[str, Any]) -> float:
    return float(fields.pop("hint"))


def takes_a_secret(response: str, answer: str, fields: dict[str, Any], secret: str) -> float:
    return 1.0


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0
