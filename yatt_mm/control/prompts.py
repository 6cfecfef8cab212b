"""Samples of the data plane as prompts: fields read, patches made by the node, unreadable media set aside."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client import Client
from dataplane.refs import BadMedia, Ref, Sample
from yatt_mm.config import Config
from yatt_mm.control.cursor import Slot
from yatt_mm.control.messages import Prompt, RunStart
from yatt_mm.errors import ConfigError

QUESTION_FIELD = "question"
ANSWER_FIELD = "answer"


class PromptSource:
    """Turns sample numbers into prompts, for one controller."""

    def __init__(
        self, client: Client, config: Config, recipe: Mapping[str, Any], start: RunStart, *, controller: int
    ) -> None:
        self._client = client
        self._recipe = recipe
        self._start = start
        self._fail_on_bad = config.data.on_bad_media == "fail"
        self._answer_of = list(range(start.num_train))
        if config.data.shuffle_answers:
            random.Random(f"answers {config.run.seed}").shuffle(self._answer_of)
        self._eval_indices = range(controller, start.num_eval, config.controllers.num)
        self._eval_prompts: list[Prompt] | None = None

    def load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Training prompts of the slots, and a notice for each one that had to be left out."""
        indices = [slot.index for slot in slots]
        answers = [self._answer_of[index] for index in indices]
        samples = self._client.samples(self._start.train_set, indices)
        if answers != indices:
            answered = self._client.samples(self._start.train_set, answers)
        else:
            answered = samples
        return self._prompts(slots, samples, [sample.fields for sample in answered])

    def load_eval(self) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """This controller's share of the held-out prompts; notices come with the first call only."""
        if self._eval_prompts is not None:
            return self._eval_prompts, []
        slots = [Slot(position=index, epoch=0, index=index) for index in self._eval_indices]
        samples = self._client.samples(self._start.eval_set, list(self._eval_indices))
        self._eval_prompts, notices = self._prompts(slots, samples, [sample.fields for sample in samples])
        return self._eval_prompts, notices

    def _prompts(
        self, slots: Sequence[Slot], samples: Sequence[Sample], answered: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Prompt], list[dict[str, Any]]]:
        sources = [ref for sample in samples for ref in sample.media]
        derived = iter(self._client.derive(sources, self._recipe))
        prompts, notices = [], []
        for slot, sample, fields in zip(slots, samples, answered):
            media = [next(derived) for _ in sample.media]
            reason = _fault(sample, media)
            if reason is None:
                prompts.append(
                    Prompt(
                        slot=slot,
                        question=str(sample.fields[QUESTION_FIELD]),
                        answer=str(fields[ANSWER_FIELD]),
                        fields=sample.fields,
                        media=tuple(ref for ref in media if isinstance(ref, Ref)),
                    )
                )
                continue
            if self._fail_on_bad:
                raise bad_media_error(sample.shard, sample.key, reason)
            notices.append({"index": slot.index, "shard": sample.shard, "key": sample.key, "reason": reason})
        return prompts, notices


def bad_media_error(shard: str, key: str, reason: str) -> ConfigError:
    """What ends a run with `data.on_bad_media=fail`."""
    return ConfigError(
        f"bad sample {key or '(none)'} in {shard}: {reason}; repair it, or set data.on_bad_media=quarantine to go "
        "on without it"
    )


def _fault(sample: Sample, media: Sequence[Ref | BadMedia]) -> str | None:
    """Why a sample cannot be used; None when it can."""
    if sample.bad:
        return sample.bad[0].reason
    for medium in media:
        if isinstance(medium, BadMedia):
            return medium.reason
    missing = [name for name in (QUESTION_FIELD, ANSWER_FIELD) if name not in sample.fields]
    if missing:
        return f"the .json member lacks {', '.join(missing)}; it has {sorted(sample.fields)}"
    return None
