"""What a judge is asked: a text with places for the question, the answer given, and the sample's fields.

Media come before the text, as in the policy's prompts. A classifier reads a conversation: the text is the user's turn,
and what is judged the assistant's, unless the text names it. Imported in controllers: no torch.
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
"""What a classifier is shown before the answer."""

PLACES = ("question", "response", "answer")


@dataclass(frozen=True, slots=True)
class JudgeTemplate:
    """A text in which `{question}`, `{response}`, `{answer}` and `{fields[name]}` are filled in."""

    text: str = DEFAULT
    needs_response: bool = True
    """False where the answer may follow as a turn of its own."""

    @property
    def names_response(self) -> bool:
        """Whether what is judged stands in the text."""
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
        """The user's turn for the judge. Raises ValueError where the sample lacks a field that the template names."""
        try:
            return self.text.format(question=question, response=response, answer=answer, fields=fields)
        except KeyError as error:
            raise ValueError(f"the template wants fields[{error.args[0]}]; the sample has {sorted(fields)}") from error


def _is_field(name: str) -> bool:
    """`fields[name]` and no more: nothing that reaches into objects."""
    inside = name.removeprefix("fields[").removesuffix("]")
    return name == f"fields[{inside}]" and inside != "" and not set(inside) & set("[].")
