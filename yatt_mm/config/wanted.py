"""What a value of the configuration should have been, in words, for each kind of error that pydantic reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
JUDGE_NAME = r"^[a-z][a-z0-9_]*$"
WEB_ADDRESS = r"^https?://"

WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text; put quotes around it, such as '\"7\"' on the command line",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a section with keys of its own",
    "model_type": "a section with keys of its own",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_long": "at most {max_length} entries, not {actual_length}",
    "too_short": "at least {min_length} entries, not {actual_length}",
    "string_pattern_mismatch": "{pattern}",
}
PATTERNS = {
    NAME: "a name of letters without accents, digits, '.', '_' and '-'",
    JUDGE_NAME: "a name of small letters, digits and '_', which begins with a letter",
    WEB_ADDRESS: "an address that begins with http:// or https://",
}
"""What the patterns of keys mean."""


def wanted(problem: Mapping[str, Any]) -> str:
    """Return what would have been right, as the end of a sentence; pydantic's own words for errors that no section
    has."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    words = WORDS.get(problem["type"])
    if words is None:
        return message
    found = {
        name: f"{value:g}" if isinstance(value, float) else PATTERNS.get(str(value), value)
        for name, value in problem.get("ctx", {}).items()
    }
    return f"wanted {re.sub(r'{(.*?)}', lambda name: str(found[name[1]]), words)}"
