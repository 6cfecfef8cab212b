"""Tests of conversations: their text for people and judges, and placeholders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.common.conversation import Conversation, Part, Turn, as_text, ask, joined, parse, split_leading_media

IMAGE, VIDEO = Part("image"), Part("video")
PIECES = st.sampled_from(["<image>", "<video>", "<", ">", "image>", " ", "\n", "a", "<imag", "é"])


@given(st.lists(PIECES).map("".join))
def test_a_text_becomes_parts_and_back(text: str) -> None:
    parts = parse(text)
    assert as_text(parts) == text
    assert [part.kind for part in parts].count("image") == text.count("<image>")
    assert joined(parts) == list(parts)
    media, rest = split_leading_media(parts)
    assert len(media) + sum(part.is_medium for part in rest) == sum(part.is_medium for part in parts)
    assert not rest or not rest[0].is_medium


@pytest.mark.parametrize(
    ("conversation", "text"),
    [
        (ask("What?", ["image"]), "What?"),
        (ask("\nWhat?", ["image"]), "What?"),
        (ask(" What?"), " What?"),
        (Conversation((Turn("user", (Part("text", "Is "), IMAGE, Part("text", " it?"))),)), "Is <image> it?"),
        (
            Conversation(
                (
                    Turn("system", (Part("text", "Be brief."),)),
                    Turn("user", (IMAGE, Part("text", "What?"))),
                    Turn("assistant", (Part("text", "A cat."),)),
                    Turn("user", (Part("text", "And "), VIDEO, Part("text", "?"))),
                )
            ),
            "user: What?\n\nassistant: A cat.\n\nuser: And <video>?",
        ),
        (Conversation((Turn("system", (Part("text", "Like "), IMAGE)), *ask(" What?", ["video"]).turns)), "What?"),
    ],
)
def test_the_text_for_people_leaves_out_the_system_and_media_at_the_beginning(
    conversation: Conversation, text: str
) -> None:
    assert conversation.text == text


def test_an_answered_conversation_ends_with_the_assistant() -> None:
    assert not ask("What?").is_answered
    answered = ask("What?", ["image"]).answered("7")
    assert answered.is_answered
    assert answered.messages()[-1] == {"role": "assistant", "content": [{"type": "text", "text": "7"}]}
    assert Conversation((Turn("user", ()),)).messages() == [{"role": "user", "content": [{"type": "text", "text": ""}]}]
