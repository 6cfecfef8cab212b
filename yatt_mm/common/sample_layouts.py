"""How the samples of a data set name their question and their answer: the layouts that published sets have, and which
of them a sample has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yatt_mm.common.sample_fields import read_answer, take_field, with_field

EXACT_MATCH = "yatt_mm.rewards.functions:exact_match"
MATHEMATICS = "yatt_mm.rewards.functions:mathematics"
ASSISTANT = ("assistant", "gpt", "model")
"""The names that data sets give to the side that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where samples have their question and their answer."""

    name: str
    """Who writes samples like this."""
    question: str
    """The field of the question; `a.b` looks into nested fields. Empty if the media alone are the question."""
    answer: str = ""
    """The field of the answer. Empty if it is the last turn of the question's conversation."""
    is_cut: bool = False
    """True if a conversation that ends with a turn of the assistant is asked without that turn."""
    reward: str = EXACT_MATCH
    """The reward function that fits such answers."""

    def question_of(self, fields: Mapping[str, Any]) -> Any:
        """Return the question: text, or a list of chat turns. ValueError says what is there instead."""
        value = take_field(fields, self.question) if self.question else ""
        if not self.is_cut:
            return value
        turns = _before_the_answer(value) if isinstance(value, list) else [{"role": "user", "content": value}]
        if isinstance(value, str):
            turns = [*_past_turns(fields.get("history") or []), *turns]
        system = fields.get("system")
        if not isinstance(system, str) or not system or _role_of(turns[0] if turns else None) == "system":
            return turns
        return [{"role": "system", "content": system}, *turns]

    def answer_of(self, fields: Mapping[str, Any]) -> str:
        """Return the answer as text. ValueError says what is there instead."""
        if self.answer:
            return read_answer(take_field(fields, self.answer), self.answer)
        turns = take_field(fields, self.question)
        last = turns[-1] if isinstance(turns, list) and turns else None
        if last is None or not _is_answer(last):
            raise ValueError(f"the last turn of {self.question} is {str(last)[:80]}; wanted one of the assistant")
        content = last.get("content", last.get("value"))
        texts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        return "".join(text for text in texts if isinstance(text, str)) if texts else read_answer(content, "answer")

    def with_answer(self, fields: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Return fields for a reward function, which has the answer as text in their place. A conversation keeps its
        last turn."""
        return with_field(fields, self.answer, answer) if self.answer else dict(fields)

    def __str__(self) -> str:
        question = self.question or "none"
        return f"{self.name} (question: {question}, answer: {self.answer or 'the last turn of the assistant'})"


OWN = Layout(name="question and answer", question="question", answer="answer")
LAYOUTS = (
    OWN,
    Layout(name="verl", question="prompt", answer="reward_model.ground_truth", reward=MATHEMATICS),
    Layout(name="EasyR1", question="problem", answer="answer", reward=MATHEMATICS),
    Layout(name="Open-R1", question="problem", answer="solution", reward=MATHEMATICS),
    Layout(name="TRL", question="prompt", answer="solution", reward=MATHEMATICS),
    Layout(name="prompt and answer", question="prompt", answer="answer"),
    Layout(name="ms-swift", question="messages", answer="solution", is_cut=True, reward=MATHEMATICS),
    Layout(name="OpenAI messages", question="messages", is_cut=True),
    Layout(name="LLaVA or ShareGPT", question="conversations", is_cut=True),
    Layout(name="ms-swift", question="query", answer="solution", is_cut=True, reward=MATHEMATICS),
    Layout(name="ms-swift", question="query", answer="response", is_cut=True),
    Layout(name="WebDataset", question="question", answer="cls"),
    Layout(name="WebDataset", question="txt", answer="cls"),
    Layout(name="WebDataset", question="", answer="cls"),
    Layout(name="WebDataset", question="question", answer="txt"),
    Layout(name="WebDataset", question="", answer="txt"),
)
"""The known layouts; the first one that a sample has counts."""


def find_layout(fields: Mapping[str, Any], *, question: str | None = None, answer: str | None = None) -> Layout:
    """Return the layout of a sample. `question` and `answer` name the fields that the user named.

    Raises ValueError if it has none of the known ones, with the nearest one.
    """
    found = next((layout for layout in LAYOUTS if not _missing(layout, fields)), None)
    if question is None and answer is None:
        if found is None:
            raise ValueError(_unknown(fields))
        return found
    base = found if found is not None and question in (None, found.question) else OWN
    return replace(
        base,
        name="fields as named",
        question=question or base.question,
        answer=answer or base.answer,
        reward=EXACT_MATCH,
    )


def _missing(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that a sample lacks for a layout."""
    missing = []
    for field in filter(None, (layout.question, layout.answer)):
        try:
            if take_field(fields, field) is None:
                missing.append(field)
        except ValueError:
            missing.append(field)
    if not layout.answer:
        turns = fields.get(layout.question)
        if not (isinstance(turns, list) and turns and _is_answer(turns[-1])):
            missing.append(f"a turn of the assistant at the end of {layout.question}")
    return missing


def _unknown(fields: Mapping[str, Any]) -> str:
    nearest = min(LAYOUTS, key=lambda layout: len(_missing(layout, fields)) / (1 + bool(layout.question)))
    known = ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS))
    return (
        f"its samples have {', '.join(sorted(fields)) or 'no fields'}, which is no known layout ({known}); the nearest "
        f"is {nearest}, of which {' and '.join(_missing(nearest, fields))} is missing"
    )


def _role_of(turn: Any) -> Any:
    return turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None


def _is_answer(turn: Any) -> bool:
    return _role_of(turn) in ASSISTANT


def _past_turns(history: Any) -> list[dict[str, str]]:
    """Return the turns of pairs of question and answer. ValueError if they are something else."""
    is_pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not is_pairs:
        raise ValueError(f"history is {str(history)[:80]}; wanted pairs of question and answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair)]


def _before_the_answer(turns: Sequence[Any]) -> list[Any]:
    return list(turns[:-1] if turns and _is_answer(turns[-1]) else turns)
