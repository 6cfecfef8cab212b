"""A conversation: turns whose contents are texts and media, in the order in which a model reads them.

Only the kinds of the media are in it. Their number and order are those of the refs that go with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dataplane.media.kinds import MediaKind

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""How a text names a medium that stands at its place."""
_PLACEHOLDER = re.compile(f"({'|'.join(PLACEHOLDERS)})")


@dataclass(frozen=True, slots=True)
class Part:
    """A text, or the place of a medium."""

    kind: MediaKind | Literal["text"]
    text: str = ""

    @property
    def is_medium(self) -> bool:
        """True at the place of a medium."""
        return self.kind != "text"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    parts: tuple[Part, ...]
    more: str = "{}"
    """Further keys of the turn that a chat template may read, such as `tool_calls`, as JSON."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns that a model reads. If the last one is not the assistant's, the model writes the next."""

    turns: tuple[Turn, ...]

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of the media, in order."""
        return tuple(part.kind for turn in self.turns for part in turn.parts if part.kind != "text")

    @property
    def is_answered(self) -> bool:
        """True if the last turn is the assistant's."""
        return self.turns[-1].role == "assistant"

    @property
    def text(self) -> str:
        """The text for people, judges and rewards: without system turns, and with placeholders only for media that
        stand behind a text."""
        return as_text(self.shown()[1])

    def answered(self, response: str) -> Conversation:
        """Return the conversation with the assistant's turn at its end."""
        return Conversation((*self.turns, Turn("assistant", (Part("text", response),))))

    def shown(self) -> tuple[list[Part], list[Part]]:
        """Return the media that come before all texts, and the rest: the media of all turns, and the texts of all turns
        but those of the system, one after another. Several turns are headed by their roles."""
        is_headed = sum(turn.role != "system" for turn in self.turns) > 1
        media: list[Part] = []
        rest: list[Part] = []
        for turn in self.turns:
            is_system = turn.role == "system"
            parts = [part for part in turn.parts if part.is_medium or not is_system]
            heading = f"\n\n{turn.role}: " if rest else f"{turn.role}: "
            if not rest:
                leading, parts = split_leading_media(parts)
                media += leading
            rest += [Part("text", heading), *parts] if is_headed and not is_system else parts
        rest = joined(rest)
        if media and rest:
            rest[0] = Part("text", rest[0].text.lstrip())
        return media, rest

    def messages(self) -> list[dict[str, Any]]:
        """Return the turns in the form that chat templates take."""
        return [
            {
                "role": turn.role,
                "content": [
                    {"type": part.kind} if part.is_medium else {"type": "text", "text": part.text}
                    for part in turn.parts or (Part("text"),)
                ],
                **json.loads(turn.more),
            }
            for turn in self.turns
        ]


def ask(text: str, kinds: Iterable[MediaKind] = ()) -> Conversation:
    """Return a conversation of one turn of the user: media, then a text."""
    return Conversation((Turn("user", (*map(Part, kinds), Part("text", text))),))


def parse(text: str) -> tuple[Part, ...]:
    """Return a text with placeholders as parts. What stands around a placeholder is kept as it is."""
    pieces = filter(None, _PLACEHOLDER.split(text))
    return tuple(Part(PLACEHOLDERS[piece]) if piece in PLACEHOLDERS else Part("text", piece) for piece in pieces)


def as_text(parts: Sequence[Part]) -> str:
    """Return parts as a text with placeholders; `parse` reads it."""
    return "".join(f"<{part.kind}>" if part.is_medium else part.text for part in parts)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbouring texts as one."""
    merged: list[Part] = []
    for part in parts:
        if merged and not part.is_medium and not merged[-1].is_medium:
            part = Part("text", merged.pop().text + part.text)
        merged.append(part)
    return merged


def split_leading_media(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Return the media at the beginning, and the rest. White space between them belongs to neither."""
    at = place = 0
    for place, part in enumerate(parts, 1):
        if part.is_medium:
            at = place
        elif part.text.strip():
            break
    return [part for part in parts[:at] if part.is_medium], list(parts[at:])
