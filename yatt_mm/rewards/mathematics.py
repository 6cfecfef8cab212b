"""Whether two answers mean the same, as math-verify sees it. Importing this takes about a second, for sympy."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it sets no alarm of its own; the worker does


def is_equal(found: str | None, wanted: str, *, text: str) -> bool:
    """Return True if a final answer means the same as the wanted one. Without a final answer, math-verify looks for one
    in the response's whole text."""
    if found is not None and _plain(found) == _plain(wanted):
        return True
    if found is None and _plain(text) == _plain(wanted):
        return True
    parsed = parse(text if found is None else f"${found}$", parsing_timeout=None)
    return bool(verify(_parsed(wanted), parsed, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(wanted: str) -> Any:
    return parse(f"${wanted.strip().strip('$')}$", parsing_timeout=None)


def _plain(answer: str) -> str:
    """Return an answer in the form in which texts are compared: `(A)`, `A.`, `\\text{A}` and `a` are the same."""
    plain = answer.strip().strip("$").strip().rstrip(".")
    for before, after in (("\\text{", "}"), ("(", ")")):
        if plain.startswith(before) and plain.endswith(after):
            plain = plain.removeprefix(before).removesuffix(after)
    return plain.strip().casefold()
