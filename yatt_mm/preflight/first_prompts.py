"""Makes the first prompts as an engine would: with the model's chat template and tokenizer, and with its media's sizes.
A model whose folder has no tokenizer.json is not checked here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompt_check import prompt_template_of
from yatt_mm.protocol.control import Prompt
from yatt_mm.rollout.engine_media import size_of


def check_prompts(config: Config, prompts: Sequence[Prompt], key: str) -> None:
    """Check that prompts of the data set that the config's `key` names can be made.

    Raises:
        ConfigError: one of them cannot be made.
    """
    folder = Path(config.model.path)
    template = prompt_template_of(config)
    if template is None:
        return
    for prompt in prompts:
        try:
            template.token_ids(prompt.conversation, [size_of(ref) for ref in prompt.media])
        except TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"model.path: the chat template in {folder} is broken: {error}{line}") from error
        except ValueError as error:
            raise ConfigError(f"{key} and model.path ({folder}) do not fit: {error}") from error
