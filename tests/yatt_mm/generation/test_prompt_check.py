"""Tests of what is set aside because no engine could take it: orders of turns, prompts that are too long, and texts
that spell special tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dataplane.core.refs import Lineage, Ref
from tests.yatt_mm import runs
from yatt_mm.common.conversation import Conversation, Part, Turn, ask
from yatt_mm.config.run_config import load_config
from yatt_mm.generation.prompt_check import FilteredError, PromptCheck
from yatt_mm.rollout.folder_tokenizer import load_prompt_template

STRICT = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
    "{%- for message in messages %}{%- generation %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}"
    "{{ message.content[0].text }}{%- endgeneration %}{%- endfor %}"
)
"""A template that refuses what those of Gemma and Mistral refuse."""


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder without its weights."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def check_of(folder: Path, *overrides: str) -> PromptCheck:
    config, *rest = runs.arguments(Path("unused"), folder, "check", "train.steps=1", *overrides)
    return PromptCheck(load_config(runs.ROOT / config, rest))


def of_roles(*roles: str) -> Conversation:
    return Conversation(tuple(Turn(role, (Part("text", "What?"),)) for role in roles))


def image(num_tokens: int = 4) -> Ref:
    lineage = Lineage(source="0" * 32, dataset="d", shard="s", offset=0, nbytes=1, recipe={"kernel": "rgb"})
    meta = {"medium": "image", "num_tokens": num_tokens, "grid_thw": [1, 4, 4]}
    return Ref(name="d/x", kind="derived", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=lineage, meta=meta)


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (("system", "user"), "refuses turns of system, user: System role not supported"),
        (("user", "user"), "refuses turns of user, user: Conversation roles must alternate"),
    ],
)
def test_an_order_that_the_template_refuses_is_named_with_its_reason(
    folder: Path, roles: tuple[str, ...], why: str
) -> None:
    (folder / "chat_template.jinja").write_text(STRICT)
    check = check_of(folder)
    check.check(of_roles("user", "assistant", "user"), ())
    for _ in range(2):
        with pytest.raises(ValueError, match=why):
            check.check(of_roles(*roles), ())


@pytest.mark.parametrize("template", ["{% broken", "{{ strftime_now('%d') }}{{ messages[0].content[0].text }}", None])
def test_a_template_that_says_nothing_of_roles_takes_all(folder: Path, template: str | None) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    check_of(folder).check(of_roles("system", "user", "tool", "user"), ())


def test_the_longest_prompt_that_leaves_room_passes_and_one_more_token_is_set_aside(folder: Path) -> None:
    limits = ("rollout.max_model_len=100", "rollout.max_tokens=20")
    template = load_prompt_template(folder, ())
    assert template is not None

    def num_tokens(conversation: Conversation, *sizes: Any) -> int:
        return len(template.token_ids(conversation, sizes))

    long = next(text for text in ("x" * n for n in range(200)) if num_tokens(ask(text)) == 80)
    check_of(folder, *limits).check(ask(long), ())
    with pytest.raises(ValueError, match=r"its prompt has 81 tokens; .*_len \(100\) less .* \(20\) leaves 80"):
        check_of(folder, *limits).check(ask(long + "x"), ())
    check_of(folder, *limits).check(ask("?", ["image"]), [image(60)])
    with pytest.raises(ValueError, match=r"its prompt has \d+ tokens"):
        check_of(folder, *limits).check(ask("?", ["image"]), [image(79)])


def test_a_filter_by_tokens_takes_the_longest_and_leaves_out_one_more(folder: Path) -> None:
    check, text = check_of(folder), "x" * 200
    template = load_prompt_template(folder, ())
    assert template is not None
    num_tokens = len(template.token_ids(ask(text), ()))
    check.check(ask(text), (), most=num_tokens)
    with pytest.raises(FilteredError, match=f"its prompt has {num_tokens} tokens; data.filter.max_prompt_tokens is"):
        check.check(ask(text), (), most=num_tokens - 1)


def test_what_is_short_enough_by_its_bytes_needs_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("broken")
    check = check_of(folder, "rollout.max_model_len=400", "rollout.max_tokens=20")
    check.check(ask("What is in the picture?", ["image"]), [image()])
    with pytest.raises(Exception, match="expected value"):
        check.check(ask("x" * 400), ())


def test_a_text_that_spells_a_special_token_is_set_aside(folder: Path) -> None:
    with pytest.raises(ValueError, match="the question must not spell one"):
        check_of(folder).check(ask("What is <|image_pad|>?", ["image"]), [image()])
    check_of(folder).check(ask("Is 3<4, <b>or</b> <|not|>?", ["image"]), [image()])


def test_a_process_that_counts_tokens_can_hold_no_picture(folder: Path) -> None:
    config, *rest = runs.arguments(Path("unused"), folder, "check", "train.steps=1", "rollout.max_model_len=20")
    code = f"""
import sys
from yatt_mm.common.conversation import ask
from yatt_mm.config.run_config import load_config
from yatt_mm.control.actor import FORBIDDEN_MODULES
from yatt_mm.generation.prompt_check import PromptCheck
try:
    PromptCheck(load_config({config!r}, {rest!r})).check(ask("What is it? " * 99), ())
except ValueError as error:
    print(error)
print([name for name in FORBIDDEN_MODULES if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, imported = done.stdout.splitlines()
    assert "tokens; rollout.max_model_len (20)" in said
    assert imported == "[]"
