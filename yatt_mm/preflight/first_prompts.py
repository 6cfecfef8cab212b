"""Makes the first prompts as an engine would: with the model's chat template and tokenizer, and with its media's sizes.

transformers' own tokenizer would take seconds to import. This one renders with transformers' code for templates and
encodes with the `tokenizers` library, so a model whose folder has no tokenizer.json is not checked here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from models.registry import load_recipe, read_config
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config
from yatt_mm.preflight.run_checks import CHAT_TEMPLATE
from yatt_mm.protocol.control import Prompt
from yatt_mm.rollout.engine_media import size_of
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import PromptTemplate


def check_prompts(config: Config, prompts: Sequence[Prompt], key: str) -> None:
    """Check that prompts of the data set that the config's `key` names can be made, and leave room for a response.

    Raises:
        ConfigError: one of them cannot be made.
    """
    folder, rollout = Path(config.model.path), config.rollout
    if not (folder / "tokenizer.json").is_file() or "image_token_id" not in read_config(folder):
        return
    template = _template_of(folder)
    for prompt in prompts:
        try:
            num_tokens = len(template.token_ids(prompt.question, [size_of(ref) for ref in prompt.media]))
        except TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"model.path: the chat template in {folder} is broken: {error}{line}") from error
        except ValueError as error:
            raise ConfigError(f"{key} and model.path ({folder}) do not fit: {error}") from error
        if num_tokens + rollout.max_tokens > rollout.max_model_len:
            raise ConfigError(
                f"{key}: the prompt for {prompt.question[:80]!r} has {num_tokens} tokens, and with rollout.max_tokens "
                f"({rollout.max_tokens}) more than rollout.max_model_len ({rollout.max_model_len}); raise the last"
            )


@functools.cache
def _template_of(folder: Path) -> PromptTemplate:
    """Return what makes prompts for a model: once for all data sets, because a large tokenizer takes its time."""
    tokens = MediaTokens.of_config(read_config(folder), load_recipe(folder).IMAGE_MARKS)
    return PromptTemplate(_Tokenizer(folder), tokens)


class _Tokenizer:
    """The tokenizer of a model's folder, with the two methods of transformers' that prompts need."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._settings)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Return the token ids of a text."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(self, turns: list[dict[str, Any]], **settings: Any) -> str:
        """Return the text of a conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {name: _content(self._settings[name]) for name in self._settings if name.endswith("_token")}
        rendered: Any = render_jinja_template(
            [turns],
            chat_template=self._template,
            add_generation_prompt=settings["add_generation_prompt"],
            **special,
        )
        return str(rendered[0][0])


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    """Return the chat template from where transformers' tokenizers read it."""
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    template = settings["chat_template"]
    if isinstance(template, list):  # several, by name
        return str({item["name"]: item["template"] for item in template}["default"])
    return str(template)


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token
