"""Random conversations in the form that transformers' processors take, and as the run reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.media.kinds import MediaKind
from yatt_mm.common.conversation import Conversation
from yatt_mm.generation.conversation_reader import ConversationReader

TEXTS = ("Look at", " this: ", "\n", "Which digit is it? ", "é→", " 12", "No.", " \t", "what", "<think>", "\n\nA. ")
PATTERNS = ("u", "su", "uau", "suau", "uauau", "suat", "sauau")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
MOST = 2
"""The most media of a kind in a conversation."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A conversation about media of a pool."""

    messages: list[dict[str, Any]]
    """The form for transformers' processors."""
    conversation: Conversation
    places: tuple[int, ...]
    """The places in the pool of the media, in the order of the conversation."""


def plain(question: str, places: Sequence[int], pool: Sequence[MediaKind]) -> Asked:
    """Return media, then a question."""
    content = [*({"type": pool[place]} for place in places), {"type": "text", "text": question}]
    return _read([{"role": "user", "content": content}], places, pool, as_texts=False)


def random_conversations(num: int, pool: Sequence[MediaKind], *, seed: int = 0) -> list[Asked]:
    """Return conversations with a system turn or none, one to five turns, and media anywhere."""
    draw = random.Random(seed)
    return [_random(draw, pool) for _ in range(num)]


def _random(draw: random.Random, pool: Sequence[MediaKind]) -> Asked:
    roles = [ROLES[letter] for letter in draw.choice(PATTERNS)]
    contents = [[_text(draw) for _ in range(draw.randint(1, 3))] for _ in roles]
    places: list[int] = []
    for _ in range(draw.randint(0, 2 * MOST)):
        place = draw.randrange(len(pool))
        if sum(pool[other] == pool[place] for other in places) < MOST:
            places.append(place)
    # the media in the order of the turns, each at a random place of a random turn
    for place, turn in zip(places, sorted(draw.choices(range(len(roles)), k=len(places))), strict=True):
        content = contents[turn]
        behind = max((at for at, part in enumerate(content) if part["type"] != "text"), default=-1) + 1
        content.insert(draw.randint(behind, len(content)), {"type": pool[place]})
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return _read(messages, places, pool, as_texts=draw.random() < 0.5)


def _text(draw: random.Random) -> dict[str, str]:
    return {"type": "text", "text": "".join(draw.choices(TEXTS, k=draw.randint(0, 4))) or "?"}


def _read(messages: list[dict[str, Any]], places: Sequence[int], pool: Sequence[MediaKind], *, as_texts: bool) -> Asked:
    """Return a conversation as the run reads it from a sample whose media are in another order than in the
    conversation."""
    value = [{**turn, "content": _as_text(turn["content"])} for turn in messages] if as_texts else messages
    by_kind = sorted(places, key=lambda place: pool[place])  # keeps the order within a kind
    asked = ConversationReader().read(value, [pool[place] for place in by_kind], {})
    return Asked(messages=messages, conversation=asked.given, places=tuple(by_kind[number] for number in asked.order))


def _as_text(content: list[dict[str, str]]) -> str:
    return "".join(part.get("text", f"<{part['type']}>") for part in content)
