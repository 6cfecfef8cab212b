"""The form of a judge's questions and replies in OpenAI's chat completions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yatt_mm.protocol.genrm import JudgeSpec
from yatt_mm.protocol.verdicts import MAX_WORDS, LabelScore, YesNo

MAX_REPORTED_TOKENS = 10**7
"""The largest number of tokens that a server may report for one reply. Larger numbers are wrong and count as 0."""

MAX_READ_CHARS = 2**14
"""The characters at the end of a text in which a verdict is looked for, because the last number or object counts. The
search for JSON objects takes time that grows with the square of the length if a server means ill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A server's reply to one question."""

    score: float | None
    """None if the reply contains no verdict."""
    said: str
    num_tokens: int
    has_logprobs: bool
    """True if the reply has the log-probabilities of the first token. Only `YesNo` needs them and looks for them."""


def question_to(model: str, spec: JudgeSpec, content: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the body of a request that asks `model` about one response. `content`: the parts of the message."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "seed": seed,
    }
    if isinstance(spec.verdict, YesNo):
        # temperature 1 leaves the distribution unchanged; words that are missing in the reply count as impossible
        body |= {"max_tokens": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": MAX_WORDS}
    return body


def read_reply(spec: JudgeSpec, text: str) -> ChatReply:
    """Return the content of a server's reply. Raises ValueError if it is not a chat completion."""
    try:
        chat = json.loads(text)
        choice = chat["choices"][0]
        message = choice.get("message")
        return ChatReply(
            score=_score(spec, choice),
            said=str((message.get("content") or "") if isinstance(message, dict) else ""),
            num_tokens=_num_tokens(chat),
            has_logprobs=isinstance(spec.verdict, YesNo) and bool(_likeliest(choice)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not a chat completion: {text}") from error


def _score(spec: JudgeSpec, choice: dict[str, Any]) -> float | None:
    """Return the score of a reply's first choice; None if it contains no verdict."""
    verdict = spec.verdict
    assert not isinstance(verdict, LabelScore), "the config refuses LabelScore with a url"
    if not isinstance(verdict, YesNo):
        return verdict.score((choice["message"].get("content") or "")[-MAX_READ_CHARS:])
    likeliest = _likeliest(choice)
    yes, no = ([likeliest.get(word, -math.inf) for word in words] for words in (verdict.yes, verdict.no))
    return verdict.score(yes, no)


def _likeliest(choice: dict[str, Any]) -> dict[str, float]:
    """Return the log-probabilities of the likeliest first tokens; none if the server gives none."""
    tokens = (choice.get("logprobs") or {}).get("content") or []
    tops = (tokens[0].get("top_logprobs") or []) if tokens else []
    return {top["token"]: float(top["logprob"]) for top in tops}


def _num_tokens(chat: dict[str, Any]) -> int:
    """Return the number of tokens that the server reports for its reply; 0 if the number is missing or impossible."""
    usage = chat.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if isinstance(number, int) and 0 <= number <= MAX_REPORTED_TOKENS else 0
