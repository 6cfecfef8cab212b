"""What controllers and judges say to each other: refs, texts and numbers. Imported in controllers: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.recipes.media_recipes import VideoSampling
from yatt_mm.protocol.judge_template import JudgeTemplate
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.verdicts import LabelScore, Verdict, YesNo


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec:
    """How a judge is asked, wherever it runs."""

    name: str
    """Names the judge in metrics and errors."""
    template: JudgeTemplate = field(default_factory=JudgeTemplate)
    verdict: Verdict = field(default_factory=YesNo)
    max_tokens: int = 256
    """Of the judge's own answer; with `YesNo` one token is enough and with `LabelScore` none, whatever stands here."""
    temperature: float = 0.0
    """0 takes the most likely token: a second attempt then says the same, and is not made."""
    num_votes: int = 1
    """Verdicts per answer, whose mean counts; above 1 only with a temperature."""
    max_attempts: int = 2
    """How often a verdict is asked for while it cannot be read, or the judge fails."""
    threshold: float | None = None
    """Answers whose votes have at least this mean get 1, others 0; None gives the mean itself."""
    score_on_failure: float = 0.0
    """What an answer gets whose verdict could not be had."""
    video: VideoSampling = field(default_factory=VideoSampling)
    """What is taken of the policy's videos for it."""

    def __post_init__(self) -> None:
        if self.num_votes > 1 and not self.temperature:
            raise ValueError(
                f"judge {self.name}: num_votes is {self.num_votes} with temperature 0, which gives the same verdict "
                "each time; set a temperature, or num_votes=1"
            )
        if self.is_unbounded:
            return
        for key, value in (("threshold", self.threshold), ("score_on_failure", self.score_on_failure)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{key} is {value:g}, but scores of this judge are between 0 and 1; set it to one")

    @property
    def is_unbounded(self) -> bool:
        """True when scores are logits, which may be any number."""
        return isinstance(self.verdict, LabelScore) and self.verdict.activation == "none"

    @property
    def is_sure(self) -> bool:
        """True when asking again would give the same."""
        return not self.temperature or isinstance(self.verdict, YesNo | LabelScore)

    @property
    def num_sampled(self) -> int:
        """Most tokens that the judge's own answer takes."""
        if isinstance(self.verdict, LabelScore):
            return 0
        return 1 if isinstance(self.verdict, YesNo) else self.max_tokens

    def score_of(self, votes: Sequence[float]) -> float:
        """Of an answer with these readable votes: their mean, or what `threshold` makes of it."""
        if not votes:
            return self.score_on_failure
        mean = sum(votes) / len(votes)
        return mean if self.threshold is None else float(mean >= self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """A server that judges, and how patient to be with it."""

    url: str
    """Up to and with the version: `http://host:8000/v1`."""
    model: str
    """Its name there."""
    api_key: str | None = field(default=None, repr=False)
    """Sent with every request; never written anywhere."""
    deadline_s: float
    """Of one request."""
    max_requests: int
    """Under way at the same time."""
    call_timeout_s: float
    """Of one call for verdicts, its requests, their queue and their repetitions together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTask:
    """A finished group and what its answers are judged by."""

    group: GroupRef
    question: str
    answer: str
    fields: Mapping[str, Any]
    seed: int
    """Every vote's seed follows from it and the vote's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """A judge's verdicts on one group."""

    scores: tuple[float, ...]
    """[G] in [0, 1], any number where they are logits, or `score_on_failure`."""
    num_retried: int
    """Verdicts that were asked for again."""
    num_failed: int
    """Answers without any verdict."""
    num_tokens: int = 0
    """Tokens that the judge wrote; 0 where a server does not tell."""
