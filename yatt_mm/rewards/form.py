"""The form of a reward function: what it takes, by the names of its parameters, and whether it takes one response or
many."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from yatt_mm.rewards.response import ARGUMENTS, Response

FIRST = ("response", "answer", "fields")
"""What the first three parameters get, whatever they are called."""
OF_VERL = ("solution_str", "solution_strs")
"""A function that has one of these parameters is called by the names of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a reward function is called."""

    first: tuple[str, ...]
    """What its first parameters get, by position."""
    named: tuple[tuple[str, str], ...]
    """(parameter, what it gets) of the others."""
    is_batch: bool
    """True if each parameter gets a list with one entry per response, and the function returns such a list."""
    is_async: bool

    def arguments(self, responses: Sequence[Response]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call: for one response, or for a batch of any number."""
        if self.is_batch:
            first = [[response.value(name) for response in responses] for name in self.first]
            return first, {key: [response.value(name) for response in responses] for key, name in self.named}
        (response,) = responses
        return [response.value(name) for name in self.first], {key: response.value(name) for key, name in self.named}


def form_of(function: Callable[..., Any]) -> Form:
    """Return the form of a function.

    Its first three parameters are response, answer and fields, whatever they are called. If the first one is called
    `responses`, the function takes batches. Further parameters are known by their names: `ARGUMENTS`, in a batch also
    with an `s` at the end. A function of verl's form is called by the names of its parameters. Raises ValueError if it
    has others without a default.
    """
    parameters = inspect.signature(function).parameters.values()
    taken = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    names = [parameter.name for parameter in taken]
    is_by_name = any(name in OF_VERL for name in names)
    num_first = 0 if is_by_name else len(FIRST)
    positional = [parameter for parameter in taken if parameter.kind is not parameter.KEYWORD_ONLY]
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if len(positional) < num_first and not takes_any:
        raise ValueError(f"it takes ({', '.join(names)}); wanted (response, answer, fields)")
    is_batch = bool({"responses", "solution_strs"} & set(names[: num_first or None]))
    named = []
    for parameter in taken[num_first:]:
        what = _what(parameter.name, is_batch)
        if what is not None:
            named.append((parameter.name, what))
        elif parameter.default is parameter.empty:
            others = ", ".join(name for name in ARGUMENTS if name not in FIRST)
            raise ValueError(
                f"it takes {parameter.name}, which nothing is known about; the first three parameters are response, "
                f"answer and fields, and others may be called {others}"
            )
    is_async = inspect.iscoroutinefunction(function)
    return Form(first=FIRST[:num_first], named=tuple(named), is_batch=is_batch, is_async=is_async)


def _what(name: str, is_batch: bool) -> str | None:
    """Return what a parameter of this name gets; None if the name is not known."""
    if name in ARGUMENTS:
        return name
    single = name.removesuffix("s")
    return single if is_batch and single in ARGUMENTS else None
