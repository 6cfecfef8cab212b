"""The text that a judge gets: a template with places for the question, the response, and the sample's fields.

Media come before the text, as in the policy's prompts. A classifier reads a conversation: the text is the user's turn,
and the response is the assistant's turn, unless the text names it. Imported in controllers: no torch.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = """Question: {question}
Answer given: {response}
Is the answer right? Say yes or no."""

CONVERSATION = "{question}"
"""The text that a classifier gets before the response."""

PLACES = ("question", "response", "answer")


@dataclass(frozen=True, slots=True)
class JudgeTemplate:
    """A text in which `{question}`, `{response}`, `{answer}` and `{fields[name]}` are filled in."""

    text: str = DEFAULT
    needs_response: bool = True
    """False where the response may follow as its own turn."""

    @property
    def names_response(self) -> bool:
        """True if the template has a place for the response."""
        return any(name == "response" for _, name, _, _ in string.Formatter().parse(self.text))

    def __post_init__(self) -> None:
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise ValueError(f"the template cannot be read ({error}); write {{{{ and }}}} for braces") from error
        names = [name for _, name, _, _ in parts if name is not None]
        unknown = [name for name in names if name not in PLACES and not _is_field(name)]
        if unknown:
            raise ValueError(
                f"the template names {{{unknown[0]}}}; it may name {{question}}, {{response}}, {{answer}} and "
                "{fields[name]} (write {{ and }} for braces)"
            )
        if any(spec or conversion for _, _, spec, conversion in parts):
            raise ValueError("the template has a name with a format or a conversion; write {name} and no more")
        if self.needs_response and not self.names_response:
            raise ValueError("the template does not name {response}; a judge must see what it judges")

    def fill(self, *, question: str, response: str, answer: str, fields: Mapping[str, Any]) -> str:
        """Return the user's turn for the judge. Raises ValueError where the sample lacks a field that the template
        names."""
        try:
            return self.text.format(question=question, response=response, answer=answer, fields=fields)
        except KeyError as error:
            raise ValueError(f"the template wants fields[{error.args[0]}]; the sample has {sorted(fields)}") from error


def _is_field(name: str) -> bool:
    """Return True for `fields[name]` and nothing more, so that a template cannot reach into objects."""
    inside = name.removeprefix("fields[").removesuffix("]")
    return name == f"fields[{inside}]" and inside != "" and not set(inside) & set("[].")
