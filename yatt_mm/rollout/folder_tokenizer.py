"""The tokenizer of a model's folder without transformers' own, which would take seconds and much memory to import.

It renders as transformers does (`yatt_mm.common.chat_template`) and encodes with the `tokenizers` library.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from models.registry import load_recipe, read_config
from yatt_mm.common.chat_template import ChatTemplate, read_chat_template
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import PromptTemplate

TOKENIZER = "tokenizer.json"


class FolderTokenizer:
    """The two methods of transformers' tokenizers that prompts need."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        config = folder / "tokenizer_config.json"
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        self._template_text = read_chat_template(folder)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Return the token ids of a text."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def apply_chat_template(self, turns: list[dict[str, Any]], *, tokenize: bool, **settings: Any) -> str:
        """Return the text of a conversation. Raises jinja2.TemplateError if the template is broken or refuses it."""
        assert not tokenize
        special = {name: _content(self._settings[name]) for name in self._settings if name.endswith("_token")}
        return self._template.render(turns, **special, **settings)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        assert self._template_text is not None, "the preflight looks for a template"
        return ChatTemplate(self._template_text)


@functools.cache
def load_prompt_template(folder: Path, arguments: tuple[tuple[str, Any], ...]) -> PromptTemplate | None:
    """Return what makes the prompts of the model in a folder; None if the folder has no tokenizer.json, or if its
    config does not name the tokens of media. A process loads it once, because a large tokenizer takes its time.

    `arguments`: further arguments of the chat template, as (name, value).
    """
    config = read_config(folder)
    if not (folder / TOKENIZER).is_file() or "image_token_id" not in config:
        return None
    tokens = MediaTokens.of_config(config, load_recipe(folder).IMAGE_MARKS)
    return PromptTemplate(FolderTokenizer(folder), tokens, arguments=dict(arguments))


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token
