"""The body of a judge: reads finished groups and their media through refs, asks the model, reads its verdicts.

Consumes: `JudgeTask`s (refs and texts, no pixels).  Produces: `JudgedGroup`s.
Waits for: the data plane and the engine, each within its own deadline.  Unblocked by: their answers or their end.
The policy's patches serve the judge as they are where both want the same recipe: nothing is processed twice.
Left out: Ray (`actor`), what is asked (`template`) and how it is read (`verdicts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.client import Client
from dataplane.reader import Reader
from dataplane.refs import BadMedia, Ref
from models.media_recipes import MediaRecipes, load_recipes
from yatt_mm.genrm.messages import JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.genrm.verdicts import LabelScore, YesNo
from yatt_mm.media import derive_media
from yatt_mm.rollout import record
from yatt_mm.rollout.attempt import sample_seed
from yatt_mm.rollout.engine import Engine, EngineConfig, GenerateRequest, Sampled
from yatt_mm.rollout.media import medium_of, size_of
from yatt_mm.rollout.messages import EngineSpec
from yatt_mm.rollout.prompts import PromptTemplate
from yatt_mm.rollout.requests import ABORTED, EngineAsleepError, EngineTimeoutError, MediaDroppedError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Vote:
    """One verdict on one answer."""

    prompt: list[int]
    media: tuple[Ref, ...]
    seed: int
    score: float | None = None
    num_asked: int = 0
    is_final: bool = False
    """True when asking again would give the same."""
    is_cut_off: bool = False
    """True when the engine fell asleep over it."""


class Judge:
    """An engine with a judge's model, and its connections to the data plane."""

    def __init__(
        self, spec: JudgeSpec, engine: Engine, client: Client, reader: Reader, *, recipes: MediaRecipes
    ) -> None:
        """`recipes`: how the judge's model wants its media.

        Raises ValueError where the verdict's words are not single tokens of the judge's tokenizer.
        """
        self.engine = engine
        self._spec = spec
        self._client = client
        self._reader = reader
        self._recipes = recipes
        self._template = PromptTemplate(engine.tokenizer, engine.media_tokens)
        self._specials: tuple[str, ...] = tuple(engine.tokenizer.all_special_tokens)
        self._yes: tuple[int, ...] = ()
        self._no: tuple[int, ...] = ()
        if isinstance(spec.verdict, YesNo):
            self._yes = self._single_tokens(spec.verdict.yes)
            self._no = self._single_tokens(spec.verdict.no)

    @classmethod
    async def start(cls, name: str, spec: JudgeSpec, engine: EngineSpec, dataplane_uri: str) -> Judge:
        """Connect, and start the engine, which is called `name`."""
        model_dir = Path(engine.model_dir)
        client = Client(dataplane_uri, timeout_s=engine.deadline_s)
        reader = Reader(dataplane_uri, timeout_s=engine.deadline_s)
        try:
            recipes = load_recipes(model_dir, spec.video)
            return cls(spec, await Engine.start(EngineConfig.of(engine, name=name)), client, reader, recipes=recipes)
        except BaseException:
            reader.close()
            client.close()
            raise

    async def judge(self, tasks: Sequence[JudgeTask], *, as_batch: bool = False) -> list[JudgedGroup | None]:
        """Verdicts on the groups, in order; None for those that the engine slept over, which are to be judged again.

        `as_batch`: the same list gives the same bits, whatever came before.
        """
        votes = await self._votes(tasks)
        for attempt in range(self._spec.max_attempts):
            asked = [vote for group in votes for answer in group for vote in answer if not vote.is_final]
            if not asked:
                break
            for vote, sampled in zip(asked, await self._ask(asked, attempt, as_batch), strict=True):
                vote.num_asked += 1
                if sampled is not None and sampled.finish_reason == "abort":
                    vote.is_final = vote.is_cut_off = True
                elif sampled is not None:
                    vote.score = self._read(sampled)
                    vote.is_final = self._spec.is_sure or vote.score is not None
        return [self._judged(group) for group in votes]

    async def shutdown(self) -> None:
        """End the engine and the connections."""
        try:
            await self.engine.shutdown()
        finally:
            self._reader.close()
            self._client.close()

    async def _votes(self, tasks: Sequence[JudgeTask]) -> list[list[list[_Vote]]]:
        """[group][answer][vote] what will be asked."""
        views = await asyncio.to_thread(self._reader.resolve, [task.group.ref for task in tasks])
        media = iter(await self._media([ref for task in tasks for ref in task.group.media]))
        votes = []
        for task, view in zip(tasks, views):
            seen = tuple(next(media) for _ in task.group.media)
            samples = record.decode(view).samples
            votes.append([self._votes_on(task, sample.text, seen, place) for place, sample in enumerate(samples)])
        return votes

    def _votes_on(self, task: JudgeTask, response: str, media: tuple[Ref, ...], place: int) -> list[_Vote]:
        template, response = self._spec.template, self._defused(response)
        text = template.fill(question=task.question, response=response, answer=task.answer, fields=task.fields)
        turn = None if template.names_response else response
        prompt = self._template.token_ids(text, [size_of(ref) for ref in media], response=turn)
        seed, room = sample_seed(task.seed, place), self.engine.config.max_model_len
        is_too_long = len(prompt) + self._spec.num_sampled > room
        if is_too_long:
            logger.warning(
                "judge %s is not asked about an answer: %d tokens to read and %d to write are more than "
                "reward.judges.%s.max_model_len, %d; raise it",
                *(self._spec.name, len(prompt), self._spec.num_sampled, self._spec.name, room),
            )
        votes = range(self._spec.num_votes)
        return [_Vote(prompt, media, sample_seed(seed, vote), is_final=is_too_long) for vote in votes]

    async def _media(self, refs: Sequence[Ref]) -> list[Ref]:
        """The same media as the judge's model wants them: the policy's own objects where both want the same."""
        made = await asyncio.to_thread(derive_media, self._client, refs, self._recipes)
        for ref in made:
            if isinstance(ref, BadMedia):
                raise ValueError(
                    f"a medium that the policy saw cannot be made for judge {self._spec.name}: {ref.reason}"
                )
        return [ref for ref in made if isinstance(ref, Ref)]

    async def _ask(self, votes: Sequence[_Vote], attempt: int, as_batch: bool) -> list[Sampled | None]:
        """The judge's words on each; None where they did not come in time, aborted where the engine sleeps."""
        if not as_batch:
            return list(await asyncio.gather(*(self._ask_one(vote, attempt) for vote in votes)))
        try:
            groups = await self.engine.generate_batch(await self._requests(votes, attempt))
        except MediaDroppedError:
            groups = await self.engine.generate_batch(await self._requests(votes, attempt))  # sends them again
        return [sampled for (sampled,) in groups]

    async def _ask_one(self, vote: _Vote, attempt: int) -> Sampled | None:
        try:
            try:
                (sampled,) = await self.engine.generate((await self._requests([vote], attempt)).pop())
            except MediaDroppedError:
                (sampled,) = await self.engine.generate((await self._requests([vote], attempt)).pop())
        except EngineAsleepError:
            return ABORTED
        except EngineTimeoutError as error:
            logger.warning("judge %s, attempt %d: %s", self._spec.name, attempt + 1, error)
            return None
        return sampled

    async def _requests(self, votes: Sequence[_Vote], attempt: int) -> list[GenerateRequest]:
        """Requests over leased views: the leases last until the engine has been sent what they show."""
        words = self._yes + self._no
        refs = [ref for vote in votes for ref in vote.media]
        views = iter(await asyncio.to_thread(self._reader.resolve, refs) if refs else ())
        return [
            GenerateRequest(
                prompt_token_ids=vote.prompt,
                media=tuple(medium_of(ref, next(views)) for ref in vote.media),
                seeds=(sample_seed(vote.seed, attempt),),
                max_tokens=self._spec.num_sampled,
                temperature=self._spec.temperature or 1.0,
                greedy=not self._spec.temperature and not words,
                scored_token_ids=words,
            )
            for vote in votes
        ]

    def _read(self, sampled: Sampled) -> float | None:
        verdict = self._spec.verdict
        if isinstance(verdict, YesNo):
            num_yes = len(self._yes)
            return verdict.score(sampled.scored_logprobs[:num_yes], sampled.scored_logprobs[num_yes:])
        if isinstance(verdict, LabelScore):
            return verdict.score(sampled.label_logits)
        score = verdict.score(sampled.text)
        if score is None:
            logger.info("judge %s: no verdict in %r", self._spec.name, sampled.text[:200])
        return score

    def _judged(self, group: list[list[_Vote]]) -> JudgedGroup | None:
        """The mean of each answer's votes that could be read; None where a vote was cut off."""
        if any(vote.is_cut_off for answer in group for vote in answer):
            return None
        read = [[vote.score for vote in answer if vote.score is not None] for answer in group]
        return JudgedGroup(
            scores=tuple(self._spec.score_of(scores) for scores in read),
            num_retried=sum(max(0, vote.num_asked - 1) for answer in group for vote in answer),
            num_failed=sum(not scores for scores in read),
        )

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
