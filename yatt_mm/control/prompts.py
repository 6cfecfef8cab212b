"""Samples of the data plane as prompts: fields read, patches made by the node, unreadable media set aside."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client import Client
from dataplane.refs import BadMedia, Ref, Sample
from yatt_mm.config import Config
from yatt_mm.control.cursor import Slot
from yatt_mm.control.fields import question_text, take_field, with_field
from yatt_mm.control.messages import Prompt, RunStart
from yatt_mm.errors import DataError

DERIVE_CHUNK = 64
"""Media per call to the data plane."""


class PromptSource:
    """Turns sample numbers into prompts, for one controller."""

    def __init__(
        self, client: Client, config: Config, recipe: Mapping[str, Any], start: RunStart, *, controller: int
    ) -> None:
        self._client = client
        self._recipe = recipe
        self._start = start
        self._fail_on_bad = config.data.on_bad_media == "fail"
        self._limits = config.rollout
        self._question_field, self._answer_field = config.data.question_field, config.data.answer_field
        self._answer_of: list[int] | None = None
        if config.data.shuffle_answers:
            self._answer_of = list(range(start.num_train))
            random.Random(f"answers {config.run.seed}").shuffle(self._answer_of)
        self._eval_indices = range(controller, start.num_eval, config.controllers.num)
        self._eval_prompts: list[Prompt] | None = None

    def load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Training prompts of the slots, and a notice for each one that had to be left out."""
        samples = self._client.samples(self._start.train_set, [slot.index for slot in slots])
        donors = samples
        if self._answer_of is not None:
            answers = [self._answer_of[slot.index] for slot in slots]
            donors = self._client.samples(self._start.train_set, answers)
        return self._prompts(slots, samples, donors)

    def prefetch(self, slots: Sequence[Slot]) -> None:
        """Have the node begin with the patches of slots that will be loaded later. Waits for no patch."""
        samples = self._client.samples(self._start.train_set, [slot.index for slot in slots])
        self._client.prefetch([ref for sample in samples for ref in sample.media], self._recipe)

    def load_eval(self) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """This controller's share of the held-out prompts; notices come with a fresh run's first call only."""
        if self._eval_prompts is not None:
            return self._eval_prompts, []
        slots = [Slot(position=index, epoch=0, index=index) for index in self._eval_indices]
        samples = self._client.samples(self._start.eval_set, list(self._eval_indices))
        self._eval_prompts, notices = self._prompts(slots, samples, samples)
        return self._eval_prompts, notices if self._start.checkpoint is None else []

    def _prompts(
        self, slots: Sequence[Slot], samples: Sequence[Sample], donors: Sequence[Sample]
    ) -> tuple[list[Prompt], list[dict[str, Any]]]:
        derived = iter(self._derive([ref for sample in samples for ref in sample.media]))
        prompts, notices = [], []
        for slot, sample, donor in zip(slots, samples, donors):
            media = [next(derived) for _ in sample.media]
            reason = self._fault(sample, donor, media)
            if reason is None:
                answer = str(take_field(donor.fields, self._answer_field))
                prompts.append(
                    Prompt(
                        slot=slot,
                        question=question_text(take_field(sample.fields, self._question_field), len(media)),
                        answer=answer,
                        fields=with_field(sample.fields, self._answer_field, answer),
                        media=tuple(ref for ref in media if isinstance(ref, Ref)),
                    )
                )
                continue
            if self._fail_on_bad:
                raise bad_media_error(sample.shard, sample.key, reason)
            notices.append(
                {
                    "position": slot.position,
                    "index": slot.index,
                    "shard": sample.shard,
                    "key": sample.key,
                    "reason": reason,
                }
            )
        return prompts, notices

    def _derive(self, refs: Sequence[Ref]) -> list[Ref | BadMedia]:
        """Patches of all refs; in several calls, so that each is well within its deadline."""
        starts = range(0, len(refs), DERIVE_CHUNK)
        return [
            result
            for start in starts
            for result in self._client.derive(refs[start : start + DERIVE_CHUNK], self._recipe)
        ]

    def _fault(self, sample: Sample, donor: Sample, media: Sequence[Ref | BadMedia]) -> str | None:
        """Why a sample cannot be used; None when it can."""
        for bad in (*sample.bad, *donor.bad, *(medium for medium in media if isinstance(medium, BadMedia))):
            return bad.reason
        try:
            question_text(take_field(sample.fields, self._question_field), len(media))
            take_field(sample.fields, self._answer_field)
            take_field(donor.fields, self._answer_field)
        except ValueError as error:
            return str(error)
        if len(media) > self._limits.max_images_per_prompt:
            return f"{len(media)} images; rollout.max_images_per_prompt is {self._limits.max_images_per_prompt}"
        num_tokens = sum(int(ref.meta["num_tokens"]) for ref in media if isinstance(ref, Ref))
        room = self._limits.max_model_len - self._limits.max_tokens
        if num_tokens >= room:
            return (
                f"its images make {num_tokens} tokens; rollout.max_model_len ({self._limits.max_model_len}) less "
                f"rollout.max_tokens ({self._limits.max_tokens}) leaves {room} for the whole prompt"
            )
        return None


def bad_media_error(shard: str, key: str, reason: str) -> DataError:
    """What ends a run with `data.on_bad_media=fail`."""
    return DataError(
        f"bad sample {key or '(none)'} in {shard}: {reason}; repair it, or set data.on_bad_media=quarantine to go "
        "on without it"
    )
