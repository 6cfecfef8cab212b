"""The reward functions of the project. A reward function is a plain function (response, answer, fields) -> float, named
in `reward.function`.

`fields` has all fields of the sample. A response that cannot be parsed scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from yatt_mm.rewards.answers import final_answer


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


def mathematics(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the response's final answer means the same as the answer, else 0.0: `1/2`, `\frac{1}{2}` and `0.5`
    do. math-verify compares them.

    The final answer is what stands in the last `\boxed{}`, or in the last `<answer></answer>`, or else what math-verify
    finds in the text. Answers that are no mathematics, such as a letter, count if the final answer is the same text.
    """
    from yatt_mm.rewards.mathematics import is_equal

    found = final_answer(response)
    wanted = final_answer(answer) or answer.strip()
    return float(is_equal(found, wanted, text=response))
