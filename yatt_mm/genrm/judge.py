"""A judge in an engine of the run: resolves finished groups and their media, asks the model, reads its verdicts.

Consumes: `JudgeTask`s (refs and texts, no pixels).  Produces: `JudgedGroup`s.
Waits for: the data plane and the engine, each within its own deadline.  Unblocked by: their replies or their end.
If judge and policy use the same recipe, the judge gets the policy's patches, and no medium is processed twice.
Left out: Ray (`actor`), the text that is asked (`yatt_mm.protocol.judge_template`) and how a verdict becomes a score
(`yatt_mm.protocol.verdicts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.refs import BadMedia, Ref
from models.recipes.media_recipes import MediaRecipes, load_recipes
from yatt_mm.common.media_refs import derive_media
from yatt_mm.genrm.vote import Vote
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.protocol.genrm import MAX_WORDS_CHARS, JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.protocol.verdicts import LabelScore, YesNo
from yatt_mm.rollout.continuation import sample_seed
from yatt_mm.rollout.engine_media import medium_of, size_of
from yatt_mm.rollout.engine_types import ABORTED, EngineAsleepError, EngineTimeoutError, MediaDroppedError
from yatt_mm.rollout.prompt_template import PromptTemplate
from yatt_mm.rollout.vllm_engine import EngineConfig, GenerateRequest, Sampled, VllmEngine

logger = logging.getLogger(__name__)


class Judge:
    """One engine of a judge, with its connections to the data plane."""

    def __init__(
        self, spec: JudgeSpec, engine: VllmEngine, client: Client, reader: Reader, *, recipes: MediaRecipes
    ) -> None:
        """Make a judge around a started engine. `recipes`: how the judge's model needs its media.

        Raises ValueError if none of the verdict's words is a single token of the judge's tokenizer.
        """
        self.engine = engine
        self._spec = spec
        self._client = client
        self._reader = reader
        self._recipes = recipes
        self._template = PromptTemplate(engine.tokenizer, engine.media_tokens)
        self._specials = _special_tokens(engine.tokenizer)
        self._yes: tuple[int, ...] = ()
        self._no: tuple[int, ...] = ()
        if isinstance(spec.verdict, YesNo):
            try:
                self._yes, self._no = spec.verdict.token_ids(self._encode)
            except ValueError as error:
                raise ValueError(f"judge {spec.name} ({engine.config.model_dir}): {error}") from error

    @classmethod
    async def start(cls, name: str, spec: JudgeSpec, engine: EngineSpec, dataplane_uri: str) -> Judge:
        """Connect to the data plane, start an engine called `name`, and return the judge."""
        model_dir = Path(engine.model_dir)
        async with AsyncExitStack() as undo:
            client = undo.enter_context(Client(dataplane_uri, timeout_s=engine.deadline_s))
            reader = undo.enter_context(Reader(dataplane_uri, timeout_s=engine.deadline_s))
            recipes = load_recipes(model_dir, spec.video)
            running = await VllmEngine.start(EngineConfig.of(engine, name=name))
            undo.push_async_callback(running.shutdown)
            judge = cls(spec, running, client, reader, recipes=recipes)
            undo.pop_all()  # the judge is complete: its `shutdown` closes them
            return judge

    async def judge(self, tasks: Sequence[JudgeTask], *, as_batch: bool = False) -> list[JudgedGroup | None]:
        """Return verdicts on the groups, in order.

        None: the engine was asleep or fell asleep before the group was judged; send the group again. `as_batch`:
        compute all as one batch, so that the same list gives the same bits, no matter what came before.
        """
        votes = await self._votes(tasks)
        for attempt in range(self._spec.max_attempts):
            asked = self._open([vote for group in votes for response in group for vote in response])
            if not asked:
                break
            for same, sampled in zip(asked, await self._ask([vote for vote, *_ in asked], attempt, as_batch)):
                same[0].num_asked += 1
                if isinstance(sampled, str):
                    for vote in same:
                        vote.why = sampled
                    continue
                same[0].num_tokens += len(sampled.token_ids)
                is_cut_off = sampled.finish_reason == "abort"
                score = None if is_cut_off else self._read(sampled)
                for vote in same:
                    vote.score, vote.is_cut_off, vote.text = score, is_cut_off, sampled.text
                    vote.why = f"no verdict in {sampled.text[:MAX_SHOWN]!r}"
                    vote.is_final = is_cut_off or self._spec.is_repeatable or score is not None
        return [self._judged(task, group) for task, group in zip(tasks, votes)]

    async def shutdown(self) -> None:
        """End the engine and close the connections."""
        try:
            await self.engine.shutdown()
        finally:
            self._reader.close()
            self._client.close()

    def _open(self, votes: Sequence[Vote]) -> list[list[Vote]]:
        """Return the votes that still need a verdict, in lists of votes that share one request to the engine.

        If the verdict does not depend on luck, votes with equal inputs share a request, so equal responses get equal
        scores to the last bit. Separate requests would differ slightly, because the engine's sums depend on what else
        it computes, and a group of equal responses would then seem to have a training signal.
        """
        together: dict[object, list[Vote]] = {}
        for vote in votes:
            if not vote.is_final:
                together.setdefault(vote.key() if self._spec.is_repeatable else id(vote), []).append(vote)
        return list(together.values())

    async def _votes(self, tasks: Sequence[JudgeTask]) -> list[list[list[Vote]]]:
        """Return [group][response][vote] all votes to ask for."""
        views = await asyncio.to_thread(self._reader.resolve, [task.group.ref for task in tasks])
        media = iter(await self._media([ref for task in tasks for ref in task.group.media]))
        votes = []
        for task, view in zip(tasks, views):
            seen = [next(media) for _ in task.group.media]
            samples = group_record.decode(view).samples
            votes.append([self._votes_on(task, sample.text, seen, place) for place, sample in enumerate(samples)])
        return votes

    def _votes_on(self, task: JudgeTask, response: str, media: Sequence[Ref | BadMedia], place: int) -> list[Vote]:
        """Return the votes on one response, the sample with index `place` of its group.

        If the judge cannot be asked, there is one, which is final and has no score.
        """
        try:
            seen = _made(media)
            prompt = self._prompt(task, response, seen)
        except ValueError as error:
            logger.warning(
                "judge %s cannot be asked about a response in %s: %s", self._spec.name, task.group.ref, error
            )
            return [Vote([], (), 0, is_final=True, why=str(error))]
        seed = sample_seed(task.seed, place)
        return [Vote(prompt, seen, sample_seed(seed, vote)) for vote in range(self._spec.num_votes)]

    def _prompt(self, task: JudgeTask, response: str, media: Sequence[Ref]) -> list[int]:
        """Return the token ids that the judge reads.

        Raises ValueError if the sample lacks a field that the template names, or if the prompt is too long for the
        judge.
        """
        template, response = self._spec.template, self._defused(response)
        read = template.fill(question=task.question, response=response, answer=task.answer, fields=task.fields)
        prompt = self._template.token_ids(read, [size_of(ref) for ref in media])
        room = self.engine.config.max_model_len
        if len(prompt) + self._spec.num_sampled > room:
            raise ValueError(
                f"the judge would read {len(prompt)} tokens and write {self._spec.num_sampled}, more than "
                f"reward.judges.{self._spec.name}.max_model_len, which is {room}; raise it"
            )
        return prompt

    async def _media(self, refs: Sequence[Ref]) -> list[Ref | BadMedia]:
        """Return the same media, derived for the judge's model.

        If both models use the same recipe, these are the policy's own objects.
        """
        return await asyncio.to_thread(derive_media, self._client, refs, self._recipes)

    async def _ask(self, votes: Sequence[Vote], attempt: int, as_batch: bool) -> list[Sampled | str]:
        """Return what the judge wrote for each vote, or what was wrong if the engine was late.

        Without `as_batch`, the finish reason is "abort" if the engine was asleep.
        """
        if not as_batch:
            return list(await asyncio.gather(*(self._ask_one(vote, attempt) for vote in votes)))
        try:
            try:
                groups = await self.engine.generate_batch(await self._requests(votes, attempt))
            except MediaDroppedError:
                # the second attempt sends the media again
                groups = await self.engine.generate_batch(await self._requests(votes, attempt))
        except EngineTimeoutError as error:
            self._note_late(error, attempt)
            return [str(error)] * len(votes)
        return [sampled for (sampled,) in groups]

    async def _ask_one(self, vote: Vote, attempt: int) -> Sampled | str:
        """Return what the judge wrote for one vote, or what was wrong if the engine did not reply in time."""
        try:
            try:
                (sampled,) = await self.engine.generate((await self._requests([vote], attempt)).pop())
            except MediaDroppedError:
                (sampled,) = await self.engine.generate((await self._requests([vote], attempt)).pop())
        except EngineAsleepError:
            return ABORTED
        except EngineTimeoutError as error:
            self._note_late(error, attempt)
            return str(error)
        return sampled

    def _note_late(self, error: EngineTimeoutError, attempt: int) -> None:
        logger.warning("judge %s, attempt %d: %s", self._spec.name, attempt + 1, error)

    async def _requests(self, votes: Sequence[Vote], attempt: int) -> list[GenerateRequest]:
        """Return engine requests with views of media.

        The views keep their leases until the engine has received the media.
        """
        words = self._yes + self._no
        refs = [ref for vote in votes for ref in vote.media]
        views = iter(await asyncio.to_thread(self._reader.resolve, refs) if refs else ())
        return [
            GenerateRequest(
                prompt_token_ids=vote.prompt,
                media=tuple(medium_of(ref, next(views)) for ref in vote.media),
                seeds=(sample_seed(vote.seed, attempt),),
                max_tokens=self._spec.num_sampled,
                temperature=1.0 if words else self._spec.temperature or 1.0,  # 1.0 keeps the distribution of the words
                greedy=not self._spec.temperature and not words,
                scored_token_ids=words,
            )
            for vote in votes
        ]

    def _read(self, sampled: Sampled) -> float | None:
        """Return the score of one vote, from its text or its logits; None if it contains no verdict."""
        verdict = self._spec.verdict
        if isinstance(verdict, YesNo):
            num_yes = len(self._yes)
            return verdict.score(sampled.scored_logprobs[:num_yes], sampled.scored_logprobs[num_yes:])
        if isinstance(verdict, LabelScore):
            return verdict.score(sampled.label_logits)
        score = verdict.score(sampled.text)
        if score is None:
            logger.info("judge %s: no verdict in %r", self._spec.name, sampled.text[:MAX_SHOWN])
        return score

    def _judged(self, task: JudgeTask, group: list[list[Vote]]) -> JudgedGroup | None:
        """Return the group's scores, each from the readable votes on one response; None if a vote was cut off."""
        if any(vote.is_cut_off for response in group for vote in response):
            return None
        read = [[vote.score for vote in response if vote.score is not None] for response in group]
        said = tuple("\n\n".join(vote.text for vote in votes)[:MAX_WORDS_CHARS] for votes in group)
        return JudgedGroup(
            scores=tuple(self._spec.score_of(scores) for scores in read),
            num_retried=sum(max(0, vote.num_asked - 1) for response in group for vote in response),
            num_failed=sum(not scores for scores in read),
            fault=next((self._fault(response) for response, scores in zip(group, read) if not scores), None),
            num_tokens=sum(vote.num_tokens for response in group for vote in response),
            words=said if task.keeps_words else None,
        )

    def _fault(self, votes: list[Vote]) -> Fault:
        return Fault(what=votes[0].why, where=f"reward.judges.{self._spec.name}")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _defused(self, response: str) -> str:
        """Return the response with a space inside each special token, so that it cannot end or start a turn."""
        for special in self._specials:
            response = response.replace(special, f"{special[0]} {special[1:]}")
        return response


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of all special tokens, also of those that the tokenizer's config does not name."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def _made(media: Sequence[Ref | BadMedia]) -> tuple[Ref, ...]:
    """Return the media as refs. Raises ValueError if a medium could not be derived for the judge."""
    for ref in media:
        if isinstance(ref, BadMedia):
            raise ValueError(f"a medium that the policy saw cannot be derived for the judge: {ref.reason}")
    return tuple(ref for ref in media if isinstance(ref, Ref))
