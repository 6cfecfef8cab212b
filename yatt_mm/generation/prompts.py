"""Makes prompts from samples of the data plane: it reads their fields, lets the node make the patches, and skips
samples whose media cannot be decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from dataplane.client.client import Client
from dataplane.core.errors import DatasetError
from dataplane.core.refs import Ref, Sample
from dataplane.datasets.permutation import permuted
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.errors import DataError
from yatt_mm.common.media_refs import kind_of
from yatt_mm.config.run_config import Config
from yatt_mm.generation.conversation_reader import ConversationReader
from yatt_mm.generation.prompt_check import FilteredError, PromptCheck
from yatt_mm.protocol.control import Prompt, RunSet, RunStart, Slot

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
        self._limits, self._filter = config.rollout, config.data.filter
        self._trained = {one.name for one in start.train_sets}
        self._sets = {one.name: one for one in (*start.train_sets, *start.eval_sets)}
        self._conversations = ConversationReader(
            system_prompt=config.data.system_prompt, prompt_template=config.data.prompt_template
        )
        self._check = PromptCheck(config)
        self._shuffle_answers, self._seed = config.data.shuffle_answers, config.run.seed
        self._controller, self._num_controllers = controller, config.controllers.num
        self._eval_prompts: dict[str, list[Prompt]] = {}

    def load(self, slots: Sequence[Slot]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return the training prompts of the slots, and a notice for each one that was left out."""
        samples = self._by_set(slots, self._prepared)
        donors = self._by_set(slots, self._donors) if self._shuffle_answers else samples
        return self._prompts(slots, samples, donors)

    def prefetch(self, slots: Sequence[Slot]) -> None:
        """Let the node begin with the patches of slots that will be loaded later. Waits for no patch."""
        for name, indices in _indices_by_set(slots).items():
            self._client.prefetch(self._sets[name].dataset, indices, self._recipes.by_kind())

    def load_eval(self, held_out: RunSet) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """Return this controller's share of the prompts of a held-out set. Their positions are those among the prompts
        of all held-out sets. The notices say which samples cannot be used; only the first call for a set has any,
        and none of which the run told before its checkpoint."""
        if held_out.name in self._eval_prompts:
            return self._eval_prompts[held_out.name], []
        before = itertools.takewhile(lambda one: one.name != held_out.name, self._start.eval_sets)
        first = sum(one.num_samples for one in before)
        indices = range(self._controller, held_out.num_samples, self._num_controllers)
        slots = [Slot(position=first + at, epoch=0, index=at, set_name=held_out.name) for at in indices]
        samples = self._prepared(held_out, list(indices))
        prompts, notices = self._prompts(slots, samples, samples)
        self._eval_prompts[held_out.name] = prompts
        told = self._start.told
        return prompts, [
            one for one in notices if tuple(one[of] for of in ("set", "shard", "key", "reason")) not in told
        ]

    def _by_set(self, slots: Sequence[Slot], load: Callable[[RunSet, Sequence[int]], list[Sample]]) -> list[Sample]:
        """Return the samples of the slots, in their order; `load` is called once per set."""
        by_set = _indices_by_set(slots)
        loaded = {name: iter(load(self._sets[name], indices)) for name, indices in by_set.items()}
        return [next(loaded[slot.set_name]) for slot in slots]

    def _donors(self, of: RunSet, indices: Sequence[int]) -> list[Sample]:
        """Return the samples whose answers these get: a random order of a training set, and their own elsewhere."""
        if of.name not in self._trained:
            return self._client.samples(of.dataset, indices)
        name = f"answers of {of.name}"
        donors = [permuted(index, of.num_samples, self._seed, 0, name) for index in indices]
        return self._client.samples(of.dataset, donors)

    def _prepared(self, of: RunSet, indices: Sequence[int]) -> list[Sample]:
        """Return the samples with their patches made: one call to the node for up to `CALL_SAMPLES` samples."""
        recipes = self._recipes.by_kind()
        calls = [indices[start : start + CALL_SAMPLES] for start in range(0, len(indices), CALL_SAMPLES)]
        try:
            return [sample for some in calls for sample in self._client.prepare(of.dataset, some, recipes)]
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
                is_filtered = isinstance(fault, FilteredError)
                if self._fail_on_bad and not is_filtered:
                    raise bad_media_error(sample.shard, sample.key, str(fault)) from fault
                where = {"position": slot.position, "set": slot.set_name, "index": slot.index}
                where |= {"shard": sample.shard, "key": sample.key}
                notices.append({**where, "reason": str(fault), "is_filtered": is_filtered})
        return prompts, notices

    def _prompt(self, slot: Slot, sample: Sample, donor: Sample) -> Prompt:
        """Return the prompt of a sample, with the answer of `donor`: the sample itself, or another one in a control
        run. Raises ValueError with the reason why a sample cannot be used."""
        for bad in (*sample.bad, *donor.bad):
            raise ValueError(bad.reason)
        media, own = sample.media, self._sets[slot.set_name]
        value = own.layout.question_of(sample.fields)
        asked = self._conversations.read(value, [kind_of(ref) for ref in media], sample.fields)
        own.layout.answer_of(sample.fields)
        answer = own.layout.answer_of(donor.fields)
        self._check_limits(media)
        media = tuple(media[place] for place in asked.order)
        is_trained = slot.set_name in self._trained
        if is_trained:
            self._check_pixels(media)
        self._check.check(asked.given, media, most=self._filter.max_prompt_tokens if is_trained else None)
        return Prompt(
            slot=slot,
            conversation=asked.given,
            question=asked.question,
            answer=answer,
            fields=own.layout.with_answer(sample.fields, answer),
            reward=own.reward,
            media=media,
        )

    def _check_pixels(self, media: Sequence[Ref]) -> None:
        """Raises FilteredError if `data.filter` leaves out a medium of this size."""
        least, most = self._filter.min_pixels, self._filter.max_pixels
        if least is None and most is None:
            return
        for ref in media:
            height, width = ref.meta["source_size"]
            size = f"it has {kind_of(ref)}s of {width}x{height} = {width * height} pixels"
            if least is not None and width * height < least:
                raise FilteredError(f"{size}; data.filter.min_pixels is {least}")
            if most is not None and width * height > most:
                raise FilteredError(f"{size}; data.filter.max_pixels is {most}")

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


def _indices_by_set(slots: Sequence[Slot]) -> dict[str, list[int]]:
    by_set: dict[str, list[int]] = {}
    for slot in slots:
        by_set.setdefault(slot.set_name, []).append(slot.index)
    return by_set


def bad_media_error(shard: str, key: str, reason: str) -> DataError:
    """Return the error that ends a run with `data.on_bad_media=fail`."""
    return DataError(
        f"bad sample {key or '(none)'} in {shard}: {reason}; repair it, or set data.on_bad_media=quarantine to go "
        "on without it"
    )
