"""What a judge reads: a template with places for the question, the response, and the sample's fields.

A classifier reads a conversation: the question's own turns or a text as the user's turn, and the response as the
assistant's turn, unless the text names it. Imported in controllers: no torch.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yatt_mm.common.conversation import Conversation, Part, Turn, as_text, joined

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

    def fill(self, *, question: Conversation, response: str, answer: str, fields: Mapping[str, Any]) -> Conversation:
        """Return what the judge reads, with all media of the question in their order. They come first if they do so in
        the question; otherwise they stand in the text of the question, where the template names it first.

        Raises ValueError where the sample lacks a field that the template names.
        """
        if self.text == CONVERSATION and not self.needs_response:
            return question.answered(response)
        media, rest = question.shown()
        has_inner = any(part.is_medium for part in rest)
        if has_inner and not any(name == "question" for _, name, _, _ in self._pieces()):
            media, has_inner = [Part(kind) for kind in question.kinds], False
        texts = {"question": as_text(rest), "response": response, "answer": answer}
        parts = list(media)
        for literal, name, _, _ in self._pieces():
            parts.append(Part("text", literal))
            if name == "question" and has_inner:
                parts += rest
                has_inner = False
            elif name is not None:
                parts.append(Part("text", texts[name] if name in texts else str(_field(name, fields))))
        filled = Conversation((Turn("user", tuple(joined(parts))),))
        return filled if self.names_response else filled.answered(response)

    def _pieces(self) -> list[tuple[str, str | None, str | None, str | None]]:
        return list(string.Formatter().parse(self.text))


def _field(name: str, fields: Mapping[str, Any]) -> Any:
    """Return the field that a place names. Raises ValueError if the sample lacks it."""
    key = name.removeprefix("fields[").removesuffix("]")
    if key not in fields:
        raise ValueError(f"the template wants fields[{key}]; the sample has {sorted(fields)}")
    return fields[key]


def _is_field(name: str) -> bool:
    """Return True for `fields[name]` and nothing more, so that a template cannot reach into objects."""
    inside = name.removeprefix("fields[").removesuffix("]")
    return name == f"fields[{inside}]" and inside != "" and not set(inside) & set("[].")
