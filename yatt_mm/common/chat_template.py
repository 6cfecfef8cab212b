"""The chat template in a model's folder, which writes the text of a conversation.

It is rendered as transformers renders it, without importing transformers, which would take a second and bring Pillow
into processes that must not be able to hold a picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT_TEMPLATE = "chat_template.jinja"


class RefusedError(TemplateError):
    """A template refused a conversation; the message is the template's."""


class ChatTemplate:
    """A chat template that was read."""

    def __init__(self, text: str) -> None:
        """Raises jinja2.TemplateError if the template is broken."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(text)

    def render(self, turns: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Return the text of a conversation. Raises RefusedError if the template refuses it, and what a template raises
        that computes with what is not there."""
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        return self._template.render(messages=turns, **(defaults | arguments))


class _Generation(Extension):
    """The block `generation` of transformers. It marks what an assistant says, and changes nothing in the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template from where transformers' tokenizers read it; None if there is none."""
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several, by name
        template = {item["name"]: item["template"] for item in template}["default"]
    return None if template is None else str(template)
