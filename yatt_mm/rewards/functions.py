"""The reward functions of the project. A reward function is a plain function (response, answer, fields) -> float, named
in `reward.function`.

`fields` has all fields of the sample. A response that cannot be parsed scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def exact_match(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the response, without white space at both ends, equals the answer, else 0.0."""
    return float(response.strip() == answer.strip())


def regex_match(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the text that `fields["pattern"]` captures in the response equals the answer, else 0.0.

    The pattern (default: the last number in the text) must have one group; its last match counts.
    """
    pattern = fields.get("pattern", r"(-?\d+(?:\.\d+)?)(?!.*\d)")
    found = re.findall(pattern, response, flags=re.DOTALL)
    return float(bool(found) and str(found[-1]).strip() == answer.strip())
