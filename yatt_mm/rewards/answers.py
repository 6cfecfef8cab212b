"""Finds the final answer in a response."""

from __future__ import annotations

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = "\\boxed{"


def final_answer(text: str) -> str | None:
    r"""Return what stands in the last `<answer></answer>`, and inside it, or else in the text, in the last `\boxed{}`;
    None if there is neither."""
    tagged = _ANSWER.findall(text)
    inside = tagged[-1].strip() if tagged else None
    boxed = _last_boxed(text if inside is None else inside)
    return inside if boxed is None else boxed


def _last_boxed(text: str) -> str | None:
    """Return what stands in the last `\\boxed{}` whose braces are closed."""
    start = len(text)
    while (start := text.rfind(_BOXED, 0, start)) >= 0:
        depth = 1
        for at in range(start + len(_BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start + len(_BOXED) : at].strip()
    return None
