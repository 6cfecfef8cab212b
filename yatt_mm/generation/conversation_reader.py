"""Reads the conversation of a sample, in the forms that data sets use, and adds what the config puts around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataplane.media.kinds import PART_KINDS, MediaKind
from yatt_mm.common.conversation import PLACEHOLDERS, Conversation, Part, Turn, parse
from yatt_mm.common.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")
OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "developer": "system",
}
"""What other data sets call the roles."""
TURN_KEYS = ("role", "content", "from", "value")
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a sample asks."""

    question: Conversation
    """The sample's own turns, for judges and people."""
    given: Conversation
    """The turns that the policy reads: with `data.system_prompt` and `data.prompt_template`."""
    order: tuple[int, ...]
    """The numbers of the sample's media, in the order of the conversation."""


class ConversationReader:
    """Reads the conversations of samples."""

    def __init__(self, *, system_prompt: str = "", prompt_template: str = "") -> None:
        """`system_prompt`: the system's turn of samples without one. `prompt_template`: a Jinja template for the text
        of the last turn of the user, which it names `{{ question }}`.

        Raises ConfigError if the template cannot be read.
        """
        self._system = [("system", system_prompt, "{}")] if system_prompt else []
        self._template = prompt_template_of(prompt_template) if prompt_template else None

    def read(self, value: Any, kinds: Sequence[MediaKind], fields: Mapping[str, Any]) -> Asked:
        """Return the conversation of a sample: its question is text, or a list of turns whose contents are text or
        lists of parts, as verl, OpenAI and transformers write them.

        `kinds`: the kinds of the sample's media, from the data plane. `<image>` and `<video>` in a text are the places
        of its media. Without any, all media stand at the beginning of the first turn of the user. Raises ValueError
        with what is wrong with the sample.
        """
        turns = [("user", value, "{}")] if isinstance(value, str) else [_turn(turn) for turn in _list_of(value)]
        roles = [role for role, *_ in turns]
        if roles[-1] not in ("user", "tool"):
            raise ValueError(f"the conversation ends with a turn of {roles[-1]}; wanted one of user or tool, to answer")
        if "user" not in roles:
            raise ValueError(f"the conversation has turns of {', '.join(roles)}; wanted one of the user")
        question = _placed(turns, kinds)
        given = question
        if self._template is not None or (self._system and roles[0] != "system"):
            own = turns if roles[0] == "system" else [*self._system, *turns]
            given = _placed(self._around_the_last(own, fields), kinds)
        places = {kind: iter([place for place, found in enumerate(kinds) if found == kind]) for kind in kinds}
        return Asked(question=question, given=given, order=tuple(next(places[kind]) for kind in given.kinds))

    def _around_the_last(self, turns: list[_Raw], fields: Mapping[str, Any]) -> list[_Raw]:
        """Return the turns with the template around the last one of the user."""
        if self._template is None:
            return turns
        last = max(place for place, (role, *_) in enumerate(turns) if role == "user")
        role, text, more = turns[last]
        try:
            text = self._template.render(question=text, fields=fields)
        except TemplateError as error:
            raise ValueError(f"data.prompt_template cannot be filled in: {error}") from error
        return [*turns[:last], (role, text, more), *turns[last + 1 :]]


_Raw = tuple[str, str, str]
"""(role, text with placeholders, further keys as JSON)."""


def prompt_template_of(text: str) -> Template:
    """Return a Jinja template that names `question` and may name `fields`.

    Raises ConfigError if it cannot be read, or names something else.
    """
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        names = find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"data.prompt_template cannot be read: {error} (line {error.lineno})") from error
    if "question" not in names or names - {"question", "fields"}:
        found = ", ".join(sorted(names)) or "nothing"
        raise ConfigError(
            f"data.prompt_template names {found}; it must name {{{{ question }}}}, and may name {{{{ fields.NAME }}}}"
        )
    return template


def _list_of(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the question is a {type(value).__name__}; wanted text or a list of chat turns")
    if not value:
        raise ValueError("the question is an empty list; wanted text or a list of chat turns")
    return value


def _turn(turn: Any) -> _Raw:
    """Return a turn with its contents as text."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    role = OTHER_NAMES.get(str(role), role)
    if role not in ROLES:
        found = sorted(map(str, turn)) if isinstance(turn, Mapping) else f"a {type(turn).__name__}"
        raise ValueError(f"a turn has the role {role!r} ({found}); wanted one of {', '.join(ROLES)}")
    more = {key: item for key, item in turn.items() if key not in TURN_KEYS and item is not None}
    content = turn.get("content", turn.get("value"))
    if content is None and more:
        content = ""  # a call of a tool says nothing
    return role, content if isinstance(content, str) else _text_of(content, role), json.dumps(more, sort_keys=True)


def _text_of(content: Any, role: str) -> str:
    """Return parts of a turn as text with placeholders."""
    if not isinstance(content, list):
        raise ValueError(
            f"the content of a turn of {role} is a {type(content).__name__}; wanted text or a list of parts"
        )
    placeholder_of = {kind: placeholder for placeholder, kind in PLACEHOLDERS.items()}
    text = ""
    for part in content:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if kind in TEXT_PARTS and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in PART_KINDS:
            text += placeholder_of[PART_KINDS[kind]]
        else:
            raise ValueError(f"a turn of {role} has the part {str(part)[:80]}; wanted text, image or video")
    return text


def _placed(turns: Sequence[_Raw], kinds: Sequence[MediaKind]) -> Conversation:
    """Return the turns with the media at their places. Raises ValueError if places and media do not fit."""
    read = [Turn(role, parse(text), more) for role, text, more in turns]
    named = Conversation(tuple(read)).kinds
    if not named and kinds:
        first = next(place for place, turn in enumerate(read) if turn.role == "user")
        turn = read[first]
        read[first] = Turn(turn.role, (*map(Part, kinds), *turn.parts), turn.more)
    elif sorted(named) != sorted(kinds):
        raise ValueError(
            f"the question {turns[-1][1][:80]!r} has placeholders for {', '.join(named)}; the sample's media are "
            f"{', '.join(kinds) or 'none'}"
        )
    if not kinds and not any(part.text.strip() for turn in read if turn.role != "system" for part in turn.parts):
        raise ValueError(
            "the question is empty, and the sample has no media; write a question, or leave the sample out"
        )
    return Conversation(tuple(read))
