"""A question and the sizes of its images as the token ids that engine and trainer both use.

Left out: several turns, system prompts and videos.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class PromptTemplate:
    """The model folder's chat template and tokenizer."""

    def __init__(self, tokenizer: Any, image_token_id: int, image_marks: Sequence[str] = ()) -> None:
        """`image_marks`: tokens before and after each image that its template leaves out; none, or two.

        Raises ValueError where the tokenizer does not have them.
        """
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._marks = [_single_token(tokenizer, mark) for mark in image_marks]
        self._template = lru_cache(maxsize=4096)(self._tokenise)

    def token_ids(self, question: str, num_tokens: Sequence[int]) -> list[int]:
        """The prompt's ids with each image's placeholder repeated as often as the image has tokens.

        num_tokens: per image, in the order in which they stand in the prompt (before the question).
        Raises ValueError when the prompt does not come out with one placeholder per image.
        """
        template = self._template(question, len(num_tokens))
        num_pads = template.count(self._image_token_id)
        if num_pads != len(num_tokens):
            raise ValueError(
                f"the prompt for {question[:80]!r} has {num_pads} image placeholders for {len(num_tokens)} images: "
                "the question must not spell the placeholder, and the chat template must write one per image"
            )
        sizes = iter(num_tokens)
        expanded: list[int] = []
        for token in template:
            if token == self._image_token_id:
                expanded += [*self._marks[:1], *[token] * next(sizes), *self._marks[1:]]
            else:
                expanded.append(token)
        return expanded

    def _tokenise(self, question: str, num_images: int) -> tuple[int, ...]:
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _single_token(tokenizer: Any, mark: str) -> int:
    ids: list[int] = tokenizer(mark, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"the tokenizer has no token {mark!r} (it makes {len(ids)} of it), which stands beside images of this "
            "family; model.path must hold the tokenizer that belongs to the model"
        )
    return ids[0]
