"""A question and the sizes of its media as the token ids that engine and trainer both use.

The ids are those of the Hugging Face processor for the same media. Left out: several turns and system prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dataplane.media.kinds import MediaKind
from yatt_mm.rollout.engine_types import MediaTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumSize:
    """What a prompt must know of a medium."""

    kind: MediaKind = "image"
    num_tokens: int
    timestamps: tuple[float, ...] = ()
    """Of a video, in seconds, one per t of its grid."""


class PromptTemplate:
    """The model folder's chat template and tokenizer."""

    def __init__(self, tokenizer: Any, tokens: MediaTokens) -> None:
        """Raises ValueError where the tokenizer lacks the marks that the family sets around images."""
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._marks = [_single_token(tokenizer, mark) for mark in tokens.image_marks]
        self._template = lru_cache(maxsize=4096)(self._tokenise)
        self._encode = lru_cache(maxsize=4096)(self._encode_text)

    def token_ids(self, question: str, media: Sequence[MediumSize], *, response: str | None = None) -> list[int]:
        """The prompt's ids with each medium's placeholder repeated as often as the medium has tokens.

        media: in the order in which they stand in the prompt (before the question).
        response: the whole turn of the assistant; None ends where that is to be generated.
        Raises ValueError when the prompt does not come out with one placeholder per medium.
        """
        kinds = tuple(medium.kind for medium in media)
        template = self._template(question, kinds, response)
        kind_of = {self._tokens.image: "image", self._tokens.video: "video"}
        found = tuple(kind_of[token] for token in template if token in kind_of)
        if found != kinds:
            raise ValueError(
                f"the prompt for {question[:80]!r} has placeholders for {_words(found)} where its media are "
                f"{_words(kinds)}: the question must not spell a placeholder, and the chat template must write one "
                "per medium"
            )
        sizes = iter(media)
        expanded: list[int] = []
        for token in template:
            expanded += self._expanded(next(sizes)) if token in kind_of else (token,)
        return expanded

    def _expanded(self, medium: MediumSize) -> list[int]:
        token = self._tokens.of(medium.kind)
        assert token is not None
        if medium.kind == "image":
            return [*self._marks[:1], *[token] * medium.num_tokens, *self._marks[1:]]
        if not self._tokens.has_spans_per_frame:
            return [token] * medium.num_tokens
        assert self._tokens.start is not None and self._tokens.end is not None
        span = [self._tokens.start, *[token] * (medium.num_tokens // len(medium.timestamps)), self._tokens.end]
        expanded: list[int] = []
        for seconds in medium.timestamps:
            expanded += [*self._encode(f"<{seconds:.1f} seconds>"), *span]
        return expanded

    def _tokenise(self, question: str, kinds: tuple[MediaKind, ...], response: str | None) -> tuple[int, ...]:
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": question}]
        turns = [{"role": "user", "content": content}]
        if response is not None:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": response}]})
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=response is None)
        return self._encode_text(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _single_token(tokenizer: Any, mark: str) -> int:
    ids: list[int] = tokenizer(mark, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"the tokenizer has no token {mark!r} (it makes {len(ids)} of it), which stands beside images of this "
            "family; model.path must hold the tokenizer that belongs to the model"
        )
    return ids[0]


def _words(kinds: Sequence[str]) -> str:
    """Two images and a video, say: `image, image, video`."""
    return ", ".join(kinds) or "nothing"
