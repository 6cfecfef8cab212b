"""The chat template in a model's folder, as text."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = "chat_template.jinja"


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template from where transformers' tokenizers read it; None if there is none."""
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several, by name
        template = {item["name"]: item["template"] for item in template}["default"]
    return None if template is None else str(template)
