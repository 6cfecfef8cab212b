"""The body of a judge: reads finished groups and their media through refs, asks the model, reads its verdicts.

Consumes: `JudgeTask`s (refs and texts, no pixels).  Produces: `JudgedGroup`s.
Waits for: the data plane and the engine, each within its own deadline.  Unblocked by: their answers or their end.
The policy's patches serve the judge as they are where both want the same recipe: nothing is processed twice.
Left out: Ray (`actor`), what is asked (`template`) and how it is read (`verdicts`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client import Client
from dataplane.reader import Reader
from dataplane.refs import BadMedia, Ref
from yatt_mm.genrm.messages import JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.genrm.verdicts import YesNo
from yatt_mm.rollout import record
from yatt_mm.rollout.engine import Engine, GenerateRequest, Medium, Sampled
from yatt_mm.rollout.prompts import PromptTemplate
from yatt_mm.rollout.requests import EngineTimeoutError, MediaDroppedError
from yatt_mm.rollout.worker import medium_of, sample_seed

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """One response of a group, as the judge is asked about it."""

    prompt: list[int]
    media: tuple[Ref, ...]
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Opinion:
    """What came of one answer."""

    score: float | None
    num_retried: int


class Judge:
    """An engine with a judge's model, and its connections to the data plane."""

    def __init__(
        self, spec: JudgeSpec, engine: Engine, client: Client, reader: Reader, *, recipe: Mapping[str, Any]
    ) -> None:
        """`recipe`: how the judge's model wants its patches.

        Raises ValueError where the verdict's words are not single tokens of the judge's tokenizer.
        """
        self.engine = engine
        self._spec = spec
        self._client = client
        self._reader = reader
        self._recipe = dict(recipe)
        self._template = PromptTemplate(engine.tokenizer, engine.image_token_id)
        self._specials: tuple[str, ...] = tuple(engine.tokenizer.all_special_tokens)
        self._yes: tuple[int, ...] = ()
        self._no: tuple[int, ...] = ()
        if isinstance(spec.verdict, YesNo):
            self._yes = self._single_tokens(spec.verdict.yes)
            self._no = self._single_tokens(spec.verdict.no)

    async def judge(self, tasks: Sequence[JudgeTask]) -> list[JudgedGroup]:
        """Verdicts on the groups, in order, computed together with whatever else the engine is doing."""
        return list(await asyncio.gather(*(self._judge_group(task) for task in tasks)))

    async def _judge_group(self, task: JudgeTask) -> JudgedGroup:
        (view,) = await asyncio.to_thread(self._reader.resolve, [task.group.ref])
        group = record.decode(view)
        media = await self._media(task.group.media)
        answers = (
            self._opinion(self._answer(task, sample.text, media, place)) for place, sample in enumerate(group.samples)
        )
        opinions = await asyncio.gather(*answers)
        fallback = self._spec.score_on_failure
        return JudgedGroup(
            scores=tuple(fallback if opinion.score is None else opinion.score for opinion in opinions),
            num_retried=sum(opinion.num_retried for opinion in opinions),
            num_failed=sum(opinion.score is None for opinion in opinions),
        )

    async def _media(self, refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """The same media as the judge's model wants them: the policy's own objects where both want the same."""
        if not refs:
            return ()
        made = await asyncio.to_thread(self._client.derive, refs, self._recipe)
        for ref in made:
            if isinstance(ref, BadMedia):
                raise ValueError(
                    f"a medium that the policy saw cannot be made for judge {self._spec.name}: {ref.reason}"
                )
        return tuple(ref for ref in made if isinstance(ref, Ref))

    def _answer(self, task: JudgeTask, response: str, media: tuple[Ref, ...], place: int) -> _Answer:
        text = self._spec.template.fill(
            question=task.question, response=self._defused(response), answer=task.answer, fields=task.fields
        )
        prompt = self._template.token_ids(text, [int(ref.meta["num_tokens"]) for ref in media])
        return _Answer(prompt, media, sample_seed(task.seed, place))

    async def _opinion(self, answer: _Answer) -> _Opinion:
        """The mean of the votes, each asked for again while it cannot be read."""
        votes = [await self._vote(answer, vote) for vote in range(self._spec.num_votes)]
        scores = [vote.score for vote in votes if vote.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        return _Opinion(mean, sum(vote.num_retried for vote in votes))

    async def _vote(self, answer: _Answer, vote: int) -> _Opinion:
        for attempt in range(self._spec.max_attempts):
            seed = sample_seed(answer.seed, vote * self._spec.max_attempts + attempt)
            try:
                sampled = await self._ask(answer, seed)
            except EngineTimeoutError as error:
                logger.warning("judge %s: %s (attempt %d)", self._spec.name, error, attempt + 1)
                continue
            score = self._read(sampled)
            if score is not None:
                return _Opinion(score, attempt)
            logger.info("judge %s: no verdict in %r", self._spec.name, sampled.text[:200])
            if not self._spec.temperature:
                return _Opinion(None, attempt)  # it would say the same again
        return _Opinion(None, self._spec.max_attempts - 1)

    async def _ask(self, answer: _Answer, seed: int) -> Sampled:
        try:
            return await self._sample(answer, seed)
        except MediaDroppedError:
            return await self._sample(answer, seed)  # sends them again

    async def _sample(self, answer: _Answer, seed: int) -> Sampled:
        views = await asyncio.to_thread(self._reader.resolve, answer.media)
        media: tuple[Medium, ...] = tuple(medium_of(ref, view) for ref, view in zip(answer.media, views, strict=True))
        (sampled,) = await self.engine.generate(self._request(answer, media, seed))
        return sampled

    def _request(self, answer: _Answer, media: tuple[Medium, ...], seed: int) -> GenerateRequest:
        words = self._yes + self._no
        return GenerateRequest(
            prompt_token_ids=answer.prompt,
            media=media,
            seeds=(seed,),
            max_tokens=1 if words else self._spec.max_tokens,
            temperature=self._spec.temperature or 1.0,
            greedy=not self._spec.temperature and not words,
            scored_token_ids=words,
        )

    def _read(self, sampled: Sampled) -> float | None:
        verdict = self._spec.verdict
        if isinstance(verdict, YesNo):
            num_yes = len(self._yes)
            return verdict.score(sampled.scored_logprobs[:num_yes], sampled.scored_logprobs[num_yes:])
        return verdict.score(sampled.text)

    def _single_tokens(self, words: Sequence[str]) -> tuple[int, ...]:
        encoded = [self.engine.tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        found = tuple(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1))
        if not found:
            raise ValueError(
                f"judge {self._spec.name}: none of {', '.join(map(repr, words))} is a single token of the tokenizer in "
                f"{self.engine.config.model_dir}; name words that are, or read the verdict with a pattern"
            )
        return found

    def _defused(self, response: str) -> str:
        """A response cannot end its own turn or open another: what spells a special token is broken up."""
        for special in self._specials:
            response = response.replace(special, f"{special[0]} {special[1:]}")
        return response
