"""The prompt template of policy and judges: turns a conversation and the sizes of its media into token ids.

Engine and trainer both use these ids. They are equal to those of the Hugging Face processor for the same conversation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from dataplane.media.kinds import MediaKind
from yatt_mm.common.conversation import Conversation
from yatt_mm.rollout.engine_types import MediaTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumSize:
    """The size of a medium, as far as a prompt needs it."""

    kind: MediaKind = "image"
    num_tokens: int
    """The number of placeholder tokens."""
    timestamps: tuple[float, ...] = ()
    """The seconds, one per temporal step of a video's grid; empty for images."""


class PromptTemplate:
    """Makes prompts with the chat template and the tokenizer of a model folder."""

    def __init__(
        self, tokenizer: Any, tokens: MediaTokens, *, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`arguments`: further arguments of the chat template, such as `enable_thinking`.

        Raises ValueError if the tokenizer lacks the tokens that the family writes around images.
        """
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._arguments = arguments
        self._marks = [_single_token(tokenizer, mark) for mark in tokens.image_marks]
        self._template = lru_cache(maxsize=4096)(self._tokenise)
        self._encode = lru_cache(maxsize=4096)(self._encode_text)

    def token_ids(self, conversation: Conversation, media: Sequence[MediumSize]) -> list[int]:
        """Return the token ids of a conversation; each medium's placeholder is repeated once per token of the medium.
        They end where the assistant's turn begins, or with it if it is there.

        media: in the order in which they appear in the conversation.

        Raises ValueError if the chat template does not write one placeholder per medium.
        """
        template = self._template(conversation)
        kind_of = {self._tokens.image: "image", self._tokens.video: "video"}
        found = tuple(kind_of[token] for token in template if token in kind_of)
        kinds = tuple(medium.kind for medium in media)
        if not found == kinds == conversation.kinds:
            raise ValueError(
                f"the chat template wrote placeholders for {_words(found)} into the prompt for "
                f"{conversation.text[:80]!r}, and its media are {_words(kinds)}; it must write one per medium, and the "
                "question must not spell one"
            )
        sizes = iter(media)
        expanded: list[int] = []
        for token in template:
            expanded += self._expanded(next(sizes)) if token in kind_of else (token,)
        return expanded

    def _expanded(self, medium: MediumSize) -> list[int]:
        """Return all tokens of one medium: its placeholders, with the marks or times that the family needs."""
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

    def _tokenise(self, conversation: Conversation) -> tuple[int, ...]:
        """Return the token ids with one placeholder per medium, as the chat template writes it."""
        text = self._tokenizer.apply_chat_template(
            conversation.messages(),
            tokenize=False,
            add_generation_prompt=not conversation.is_answered,
            **self._arguments,
        )
        return self._encode_text(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _single_token(tokenizer: Any, mark: str) -> int:
    """Return the id of a mark. Raises ValueError if it is not a single token."""
    ids: list[int] = tokenizer(mark, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"the tokenizer splits {mark!r} into {len(ids)} tokens, but this family needs it as one token next to "
            "images; put the tokenizer that belongs to the model into model.path"
        )
    return ids[0]


def _words(kinds: Sequence[str]) -> str:
    """Return kinds as text, for example `image, image, video`."""
    return ", ".join(kinds) or "no media"
