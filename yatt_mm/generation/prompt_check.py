"""Whether an engine could take a prompt: the order of its turns, its length, and what its texts spell.

Controllers have no tokenizer in memory. They render the chat template once per order of turns, and count tokens only
where the number of bytes does not say that a prompt is short enough.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dataplane.core.refs import Ref
from yatt_mm.common.chat_template import ChatTemplate, RefusedError, read_chat_template
from yatt_mm.common.conversation import Conversation, Part, Turn
from yatt_mm.config.run_config import Config
from yatt_mm.rollout.engine_media import size_of
from yatt_mm.rollout.folder_tokenizer import load_prompt_template
from yatt_mm.rollout.prompt_template import PromptTemplate

MAX_ORDERS = 1024
MARK_TOKENS = 64
"""More tokens than a chat template writes around a medium, or around a frame of a video."""
_SPECIAL = re.compile(r"<\||<[A-Za-z]+_(CONTEXT|PAD)>", re.IGNORECASE)
"""What a text may spell that a tokenizer takes for one of its special tokens."""


def prompt_template_of(config: Config) -> PromptTemplate | None:
    """Return what makes a run's prompts; None if the model's folder has no tokenizer.json."""
    return load_prompt_template(Path(config.model.path), tuple(config.data.chat_template_args.items()))


class FilteredError(ValueError):
    """A sample could be used, but `data.filter` leaves it out."""


class PromptCheck:
    """Checks many prompts of a run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._arguments: dict[str, Any] = dict(config.data.chat_template_args)
        self._limits = config.rollout
        self._chat_template = _compiled(read_chat_template(Path(config.model.path)))
        self._render = lru_cache(MAX_ORDERS)(self._rendered)

    def check(self, conversation: Conversation, media: Sequence[Ref], *, most: int | None = None) -> None:
        """Raises ValueError with the reason why an engine could not take this prompt, or FilteredError if it has more
        than `most` tokens."""
        roles = tuple(turn.role for turn in conversation.turns)
        overhead, refusal = self._render(roles)
        if refusal:
            raise ValueError(f"the model's chat template refuses turns of {', '.join(roles)}: {refusal}")
        texts = [part.text for turn in conversation.turns for part in turn.parts]
        texts += [turn.more for turn in conversation.turns]
        room = self._limits.max_model_len - self._limits.max_tokens
        sizes = [size_of(ref) for ref in media]
        bound = sum(size.num_tokens + MARK_TOKENS * max(1, len(size.timestamps)) for size in sizes)
        bound += sum(map(_num_bytes, texts))  # no tokenizer of these models makes more tokens than there are bytes
        limit = room if most is None else min(room, most)
        if overhead is not None and bound + overhead <= limit and not any(map(_SPECIAL.search, texts)):
            return
        if self._template is None:
            return
        try:
            num_tokens = len(self._template.token_ids(conversation, sizes))
        except TemplateError:  # a broken template, of which the preflight tells
            return
        if num_tokens > room:
            raise ValueError(
                f"its prompt has {num_tokens} tokens; rollout.max_model_len ({self._limits.max_model_len}) less "
                f"rollout.max_tokens ({self._limits.max_tokens}) leaves {room}"
            )
        if num_tokens > limit:
            raise FilteredError(f"its prompt has {num_tokens} tokens; data.filter.max_prompt_tokens is {limit}")

    @cached_property
    def _template(self) -> PromptTemplate | None:
        return prompt_template_of(self._config)

    def _rendered(self, roles: tuple[str, ...]) -> tuple[int | None, str]:
        """Return the bytes of the template around the texts of these roles, and why it refuses them: an empty text if
        it does not. None where only the tokenizer can render it."""
        if self._chat_template is None:
            return None, ""
        turns = Conversation(tuple(Turn(role, (Part("text", "x"),)) for role in roles))
        try:
            text = self._chat_template.render(turns.messages(), add_generation_prompt=True, **self._arguments)
        except RefusedError as error:
            return None, str(error)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # what else a template needs is known to the tokenizer, not here
            return None, ""
        return _num_bytes(text), ""


def _num_bytes(text: str) -> int:
    """Return the bytes of a text in the form that tokenizers give it."""
    return len(text if text.isascii() else unicodedata.normalize("NFC", text).encode("utf-8", "replace"))


def _compiled(text: str | None) -> ChatTemplate | None:
    """Return the chat template; None if there is none, or if it cannot be read, which the preflight says."""
    try:
        return ChatTemplate(text) if text is not None else None
    except TemplateError:
        return None
