"""The messages between controllers and judges: refs, texts and numbers. Imported in controllers: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.recipes.media_recipes import VideoSampling
from yatt_mm.common.conversation import Conversation
from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.judge_template import JudgeTemplate
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.verdicts import LabelScore, Verdict, YesNo

MAX_WORDS_CHARS = 2000
"""The number of characters that are kept of what a judge wrote about one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec:
    """How a judge is asked, on engines of the run or on a remote server."""

    name: str
    """The judge's name in metrics and errors."""
    template: JudgeTemplate = field(default_factory=JudgeTemplate)
    verdict: Verdict = field(default_factory=YesNo)
    max_tokens: int = 256
    """The most tokens of the judge's own text. `YesNo` needs one token and `LabelScore` none, so both ignore this."""
    temperature: float = 0.0
    """The sampling temperature; 0 takes the most likely token. With 0 another attempt would give the same text, so
    there is only one."""
    num_votes: int = 1
    """Verdicts per response; their mean counts. Above 1 only with a temperature."""
    max_attempts: int = 2
    """The largest number of requests for one verdict, while it cannot be read or the judge fails."""
    threshold: float | None = None
    """The threshold: responses whose votes have at least this mean get 1, others 0. None gives the mean itself."""
    score_on_failure: float = 0.0
    """The score of a response without a verdict."""
    video: VideoSampling = field(default_factory=VideoSampling)
    """How the policy's videos are sampled for the judge."""

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
    def is_repeatable(self) -> bool:
        """True when asking again would give the same verdict."""
        return not self.temperature or isinstance(self.verdict, YesNo | LabelScore)

    @property
    def num_sampled(self) -> int:
        """The most tokens that the judge samples."""
        if isinstance(self.verdict, LabelScore):
            return 0
        return 1 if isinstance(self.verdict, YesNo) else self.max_tokens

    def score_of(self, votes: Sequence[float]) -> float:
        """Return the score of a response with these readable votes: their mean, or 0 or 1 with a `threshold`."""
        if not votes:
            return self.score_on_failure
        mean = sum(votes) / len(votes)
        return mean if self.threshold is None else float(mean >= self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """A remote server that judges, with the limits of its requests."""

    url: str
    """The address up to and including the version: `http://host:8000/v1`."""
    model: str
    """The model's name at the server."""
    api_key_env: str | None = None
    """The name of the launcher's environment variable with the server's key, for messages; None if it needs none."""
    api_key_file: str | None = None
    """The file with that key, which only the run's user can read. The key itself is in no message between processes."""
    deadline_s: float
    """The deadline of one request, in seconds."""
    max_outage_s: float
    """The longest time for which a verdict is asked for again while the server is away, in seconds."""
    max_requests: int
    """The most requests at the same time."""
    call_timeout_s: float
    """The timeout of one call for verdicts, in seconds: all its requests, their queue and their repetitions
    together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTask:
    """A finished group, with what a judge needs to judge its responses."""

    group: GroupRef
    question: Conversation
    """The sample's own turns, with its media in their order."""
    answer: str
    fields: Mapping[str, Any]
    seed: int
    """Every vote's seed follows from this one and the vote's place."""
    keeps_words: bool = False
    """True if what the judge writes about this group is kept for people to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """A judge's verdicts on one group."""

    scores: tuple[float, ...]
    """[G] in [0, 1], any number where they are logits, or `score_on_failure`."""
    num_retried: int
    """The number of verdicts that were asked for again."""
    num_failed: int
    """The number of responses without any verdict."""
    fault: Fault | None = None
    """Why the first of them has none."""
    num_tokens: int = 0
    """The tokens that the judge sampled; 0 where a server does not report them."""
    words: tuple[str, ...] | None = None
    """[G] the beginning of what the judge wrote about each response; None if it is not kept."""
