"""Tests of reading conversations: the forms that data sets use, where media stand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from yatt_mm.common.conversation import Conversation, Part, Turn, ask
from yatt_mm.common.errors import ConfigError
from yatt_mm.generation.conversation_reader import Asked, ConversationReader

IMAGE, VIDEO = Part("image"), Part("video")


def read(value: object, kinds: str = "", **settings: str) -> Asked:
    """Read a question about media, of which `kinds` has the first letters."""
    names: list[Any] = [{"i": "image", "v": "video"}[letter] for letter in kinds]
    return ConversationReader(**settings).read(value, names, {"level": 3})


def text(words: str) -> Part:
    return Part("text", words)


def user(*parts: Part) -> Conversation:
    return Conversation((Turn("user", parts),))


@pytest.mark.parametrize(
    ("value", "kinds", "wanted", "order"),
    [
        ("plain", "iv", ask("plain", ["image", "video"]), (0, 1)),
        ("  plain ", "", ask("  plain "), ()),
        ("<video><image>Which?", "iv", user(VIDEO, IMAGE, text("Which?")), (1, 0)),
        ("<image>\nA or <image> B?", "ii", user(IMAGE, text("\nA or "), IMAGE, text(" B?")), (0, 1)),
        ("see <image>", "i", user(text("see "), IMAGE), (0,)),
        ("<image> <video> <image>", "vii", user(IMAGE, text(" "), VIDEO, text(" "), IMAGE), (1, 0, 2)),
        ([{"role": "user", "content": "<image>Which?"}], "i", user(IMAGE, text("Which?")), (0,)),
        (
            [{"role": "user", "content": [{"type": "text", "text": "In "}, {"type": "image", "image": "a.png"}]}],
            "i",
            user(text("In "), IMAGE),
            (0,),
        ),
    ],
)
def test_media_stand_where_they_are_written(
    value: object, kinds: str, wanted: Conversation, order: tuple[int, ...]
) -> None:
    asked = read(value, kinds)
    assert (asked.question, asked.given, asked.order) == (wanted, wanted, order)


EXAMPLE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<image>What is it?", "name": None},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "And <image>?"},
]


def test_turns_of_all_sides_stay_as_they_are() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "zoom"}]}
    turns = [*EXAMPLE, call, {"role": "tool", "content": "done", "name": "zoom"}]
    asked = read(turns, "ii")
    assert [turn.role for turn in asked.given.turns] == ["system", "user", "assistant", "user", "assistant", "tool"]
    messages = asked.given.messages()
    assert messages[1] == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    assert messages[4]["tool_calls"] == [{"name": "zoom"}]
    assert messages[5] == {"role": "tool", "content": [{"type": "text", "text": "done"}], "name": "zoom"}
    assert asked.given.kinds == ("image", "image")


def test_without_placeholders_media_come_before_the_first_turn_of_the_user() -> None:
    turns = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in EXAMPLE if turn["content"]]
    parts = [turn.parts for turn in read(turns, "ii").given.turns]
    assert parts[1] == (IMAGE, IMAGE, text("What is it?"))
    assert parts[3] == (text("And ?"),)


def test_the_config_adds_to_what_the_policy_reads_and_not_to_the_question() -> None:
    settings = {"system_prompt": "Think.", "prompt_template": "{{ question }} Level {{ fields.level }}."}
    asked = read("What?", "i", **settings)
    assert asked.given.turns[0] == Turn("system", (text("Think."),))
    assert asked.given.turns[1].parts == (IMAGE, text("What? Level 3."))
    assert asked.question == ask("What?", ["image"])
    own = read(EXAMPLE, "ii", **settings)
    assert [turn.role for turn in own.given.turns] == ["system", "user", "assistant", "user"]
    assert own.given.turns[0] == own.question.turns[0], "a sample's own system turn counts"
    assert own.given.turns[1] == own.question.turns[1], "the template is around the last turn of the user"
    assert own.given.turns[3].parts == (text("And "), IMAGE, text("? Level 3."))


@pytest.mark.parametrize(
    ("value", "kinds", "reason"),
    [
        ("<image> <image> Which?", "i", "placeholders for image, image; the sample's media are image"),
        ("<video> Which?", "i", "placeholders for video; the sample's media are image"),
        ("<image> Which?", "ii", "placeholders for image; the sample's media are image, image"),
        ("see <image> there", "", "placeholders for image; the sample's media are none"),
        (EXAMPLE[:3], "i", "ends with a turn of assistant; wanted one of user or tool"),
        ([{"role": "tool", "content": "x"}], "", "turns of tool; wanted one of the user"),
        ([{"role": "boss", "content": "x"}], "", "a turn has the role 'boss' .*; wanted one of system, user"),
        ([{"from": "boss", "value": "x"}], "", r"the role 'boss' \(\['from', 'value'\]\)"),
        (["x"], "", "the role None"),
        ([{"role": "user", "content": 7}], "", "content of a turn of user is a int; wanted text or a list"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "", "has the part .*audio.*; wanted text, image or video"),
        ([], "", "the question is an empty list"),
        (7, "", "is a int; wanted text or a list of chat turns"),
        (" ", "", "the question is empty, and the sample has no media"),
        ([{"role": "system", "content": "x"}, {"role": "user", "content": ""}], "", "the question is empty"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(value: object, kinds: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(value, kinds)


def test_a_template_that_names_what_a_sample_lacks_is_told() -> None:
    with pytest.raises(ValueError, match=r"data\.prompt_template cannot be filled in: .*has no attribute 'hint'"):
        read("What?", prompt_template="{{ question }} {{ fields.hint }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ question", r"data\.prompt_template cannot be read: .* \(line 1\)"),
        ("Think first.", r"names nothing; it must name \{\{ question \}\}"),
        ("{{ content }}", r"names content; it must name \{\{ question \}\}, and may name \{\{ fields\.NAME \}\}"),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_the_run(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationReader(prompt_template=template)
