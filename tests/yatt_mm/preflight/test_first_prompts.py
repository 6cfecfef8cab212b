"""Tests that prompts are made before anything heavy starts as the engines will make them, and that what is wrong is
told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dataplane.core.refs import Lineage, Ref
from tests.yatt_mm import runs
from yatt_mm.common.chat_template import ChatTemplate
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.preflight.first_prompts import check_prompts
from yatt_mm.protocol.control import Prompt, Slot
from yatt_mm.rollout.folder_tokenizer import FolderTokenizer

TURNS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What digit is this? é 中"}]}]


def config_of(model: Path, *overrides: str) -> Config:
    config, *rest = runs.arguments(Path("unused"), model, "first", "train.steps=1", *overrides)
    return load_config(runs.ROOT / config, rest)


def prompt(question: str, *, num_images: int = 1, num_tokens: int = 4) -> Prompt:
    lineage = Lineage(source="0" * 32, dataset="d", shard="s", offset=0, nbytes=1, recipe={"kernel": "rgb"})
    meta = {"medium": "image", "num_tokens": num_tokens, "grid_thw": [1, 4, 4]}
    ref = Ref(name="d/x", kind="derived", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=lineage, meta=meta)
    slot = Slot(position=0, epoch=0, index=0)
    asked = ask(question, ["image"] * num_images)
    return Prompt(
        slot=slot, conversation=asked, question=asked, answer="7", fields={}, reward="m:f", media=(ref,) * num_images
    )


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder without its weights."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def move_template(folder: Path, template: object) -> None:
    """Put a chat template where older models have it."""
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("form", ["file", "setting", "several"])
def test_text_and_tokens_are_those_of_transformers(folder: Path, form: str) -> None:
    from transformers import AutoTokenizer

    text = (folder / "chat_template.jinja").read_text() + "{{ eos_token }}"
    if form == "file":
        (folder / "chat_template.jinja").write_text(text)
    else:
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text}]
        move_template(folder, several if form == "several" else text)
    own, theirs = FolderTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rendered = own.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    ids = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert own(rendered, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}\n{{ m }}\n{% set a = 1 %}{% endgeneration %}\n{{ a }}{% endfor %}",
        "a {%- generation -%} b {%- endgeneration -%} c{% if tools is not none %}tools{% endif %}{{ documents }}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, ensure_ascii=True) }}{{ '<é>' | tojson }}",
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}-{% endfor %}",
        "   {% if add_generation_prompt %}\n  on{% endif %}{{ enable_thinking }}{{ no_such_name }}",
    ],
)
@pytest.mark.parametrize("settings", [{}, {"add_generation_prompt": True, "enable_thinking": False}])
def test_templates_are_rendered_as_transformers_renders_them(template: str, settings: dict[str, bool]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template([TURNS], chat_template=template, **settings)
    assert ChatTemplate(template).render(TURNS, **settings) == wanted


def test_prompts_that_engines_can_use_pass(folder: Path) -> None:
    check_prompts(config_of(folder), [prompt("What digit is this?"), prompt("Which?", num_images=2)], "data.train")
    (folder / "tokenizer.json").unlink()
    check_prompts(config_of(folder), [prompt("What digit is this?", num_tokens=10**6)], "data.train")


@pytest.mark.parametrize(
    ("template", "question", "reason"),
    [
        (
            None,
            "<|image_pad|> What?",
            "data.eval and model.path .* do not fit: the chat template wrote placeholders for image, image into",
        ),
        (
            "{{ messages[0].content[1].text }}",
            "What?",
            "wrote placeholders for no media into the prompt for 'What\\?', and its media are image; it must write one",
        ),
        (
            "{{ raise_exception('only text, please') }}",
            "What?",
            r"model.path: the chat template in .* is broken: only text",
        ),
        (
            "{% for message in %}",
            "What?",
            r"model.path: the chat template in .* is broken: Expected an expression.* \(line 1\)",
        ),
    ],
)
def test_a_template_or_a_question_that_cannot_work_is_told(
    folder: Path, template: str | None, question: str, reason: str
) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=reason.replace("|", r"\|")):
        check_prompts(config_of(folder), [prompt(question)], "data.eval")
