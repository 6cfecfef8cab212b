"""Makes prompts from samples of the data plane: it reads their fields, lets the node make the patches, and skips
samples whose media cannot be decoded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dataplane.client.client import Client
from dataplane.core.errors import DatasetError
from dataplane.core.refs import Ref, Sample
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.errors import DataError
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.sample_fields import read_answer, take_field, with_field
from yatt_mm.config.run_config import Config
from yatt_mm.generation.conversation_reader import ConversationReader
from yatt_mm.generation.prompt_check import PromptCheck
from yatt_mm.protocol.control import Prompt, RunStart, Slot

CALL_SAMPLES = 256
"""The largest number of samples of one call to the node, so that each call stays well within its deadline."""


class PromptSource:
    """Turns sample numbers into prompts, for one controller."""

    def __init__(
        self, client: Client, config: Config, recipes: MediaRecipes, start: RunStart, *, controller: int
    ) -> None:
        self._client = client
        self._recipes = recipes
        self._start = start
        self._fail_on_bad = config.data.on_bad_media == "fail"
        self._limits = config.rollout
        self._question_field, self._answer_field = config.data.question_field, config.data.answer_field
        self._conversations = ConversationReader(
            system_prompt=config.data.system_prompt, prompt_template=config.data.prompt_template
        )
        self._check = PromptCheck(config)
        self._answer_of: list[int] | None = None
        if config.data.shuffle_answers:
            self._answer_of = list(range(start.num_train))
            random.Random(f"answers {config.run.seed}").shuffle(self._answer_of)
        self._eval_indices = range(controller, start.num_eval, config.controllers.num)
        self._eval_prompts: list[Prompt] | None = None

    def load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return the training prompts of the slots, and a notice for each one that was left out."""
        samples = self._prepared(self._start.train_set, [slot.index for slot in slots])
        donors = samples
        if self._answer_of is not None:
            answers = [self._answer_of[slot.index] for slot in slots]
            donors = self._client.samples(self._start.train_set, answers)
        return self._prompts(slots, samples, donors)

    def prefetch(self, slots: Sequence[Slot]) -> None:
        """Let the node begin with the patches of slots that will be loaded later. Waits for no patch."""
        self._client.prefetch(self._start.train_set, [slot.index for slot in slots], self._recipes.by_kind())

    def load_eval(self) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return this controller's share of the held-out prompts. The notices say which samples cannot be used; only
        the first call of a fresh run has any."""
        if self._eval_prompts is not None:
            return self._eval_prompts, []
        slots = [Slot(position=index, epoch=0, index=index) for index in self._eval_indices]
        samples = self._prepared(self._start.eval_set, list(self._eval_indices))
        self._eval_prompts, notices = self._prompts(slots, samples, samples)
        return self._eval_prompts, notices if self._start.checkpoint is None else []

    def _prepared(self, dataset: str, indices: Sequence[int]) -> list[Sample]:
        """Return the samples with their patches made: one call to the node for up to `CALL_SAMPLES` samples."""
        recipes = self._recipes.by_kind()
        calls = [indices[start : start + CALL_SAMPLES] for start in range(0, len(indices), CALL_SAMPLES)]
        try:
            return [sample for some in calls for sample in self._client.prepare(dataset, some, recipes)]
        except DatasetError as error:
            raise DataError(
                f"{error}. A run needs its files as they were at its start: put them back and go on with --resume, or "
                "start afresh"
            ) from error

    def _prompts(
        self, slots: Sequence[Slot], samples: Sequence[Sample], donors: Sequence[Sample]
    ) -> tuple[list[Prompt], list[dict[str, Any]]]:
        prompts, notices = [], []
        for slot, sample, donor in zip(slots, samples, donors):
            try:
                prompts.append(self._prompt(slot, sample, donor))
            except ValueError as fault:
                if self._fail_on_bad:
                    raise bad_media_error(sample.shard, sample.key, str(fault)) from fault
                where = {"position": slot.position, "index": slot.index, "shard": sample.shard, "key": sample.key}
                notices.append({**where, "reason": str(fault)})
        return prompts, notices

    def _prompt(self, slot: Slot, sample: Sample, donor: Sample) -> Prompt:
        """Return the prompt of a sample, with the answer of `donor`: the sample itself, or another one in a control
        run. Raises ValueError with the reason why a sample cannot be used."""
        for bad in (*sample.bad, *donor.bad):
            raise ValueError(bad.reason)
        media = sample.media
        value = take_field(sample.fields, self._question_field)
        asked = self._conversations.read(value, [kind_of(ref) for ref in media], sample.fields)
        read_answer(take_field(sample.fields, self._answer_field), self._answer_field)
        answer = read_answer(take_field(donor.fields, self._answer_field), self._answer_field)
        self._check_limits(media)
        media = tuple(media[place] for place in asked.order)
        self._check.check(asked.given, media)
        return Prompt(
            slot=slot,
            conversation=asked.given,
            question=asked.question,
            answer=answer,
            fields=with_field(sample.fields, self._answer_field, answer),
            media=media,
        )

    def _check_limits(self, media: Sequence[Ref]) -> None:
        limits = self._limits
        for kind, most in (("image", limits.max_images_per_prompt), ("video", limits.max_videos_per_prompt)):
            num = sum(kind_of(ref) == kind for ref in media)
            if num > most:
                raise ValueError(f"{num} {kind}s; rollout.max_{kind}s_per_prompt is {most}")
        num_tokens = sum(int(ref.meta["num_tokens"]) for ref in media)
        room = limits.max_model_len - limits.max_tokens
        if num_tokens >= room:
            raise ValueError(
                f"its media make {num_tokens} tokens; rollout.max_model_len ({limits.max_model_len}) less "
                f"rollout.max_tokens ({limits.max_tokens}) leaves {room} for the whole prompt"
            )


def bad_media_error(shard: str, key: str, reason: str) -> DataError:
    """Return the error that ends a run with `data.on_bad_media=fail`."""
    return DataError(
        f"bad sample {key or '(none)'} in {shard}: {reason}; repair it, or set data.on_bad_media=quarantine to go "
        "on without it"
    )
