"""Makes prompts of the samples of a data set, as a run would, and measures them."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import TemplateError

from dataplane.client.client import Client
from dataplane.core.refs import Ref
from dataplane.datasets.permutation import permuted
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.reasons import Reasons
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.preflight.run_sets import FoundSet
from yatt_mm.protocol.control import Prompt, RunStart, Slot
from yatt_mm.rollout.engine_media import size_of
from yatt_mm.rollout.prompt_template import PromptTemplate

CHUNK_SAMPLES = 64
"""The number of samples that are made at a time."""
PROMPT_TOKENS = "tokens of a prompt"
MEDIA_TOKENS = "tokens of its media"
ANSWER_CHARS = "characters of an answer"
IMAGES, VIDEOS = "images of a sample", "videos of a sample"
PATCHES = "patches of a medium"
WIDTH, HEIGHT = "width in pixels", "height in pixels"
FRAMES, SECONDS = "frames of a video", "seconds of a video"
MEASURES = (PROMPT_TOKENS, MEDIA_TOKENS, ANSWER_CHARS, IMAGES, VIDEOS, PATCHES, WIDTH, HEIGHT, FRAMES, SECONDS)
"""All measures, in the order in which they are shown."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was seen of a data set."""

    found: FoundSet
    num_usable: int = 0
    """The number of samples that a run would use, of those that were looked at."""
    num_filtered: int = 0
    """The number that `data.filter` leaves out."""
    num_unusable: int = 0
    """The number that cannot be used."""
    first: list[Prompt] = field(default_factory=list)
    """The first samples that a run would use."""
    measures: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in MEASURES})
    """[name of a measure] its values: one for each usable sample, or for each medium of them."""
    reasons: Reasons = field(default_factory=Reasons)
    """Why samples are left out."""
    examples: dict[str, str] = field(default_factory=dict)
    """[reason] the first sample that is left out for it."""

    @property
    def num_seen(self) -> int:
        """The number of samples that were looked at."""
        return self.num_usable + self.num_filtered + self.num_unusable

    @property
    def measured(self) -> dict[str, array[float]]:
        """The measures that have values, and not zeros alone."""
        return {name: values for name, values in self.measures.items() if any(values)}

    def leave_out(self, notice: dict[str, Any]) -> None:
        """Count a sample that is left out."""
        if self.reasons.add(notice["reason"]):
            self.examples[notice["reason"]] = f"{notice['key']} in {notice['shard']}"
        if notice["is_filtered"]:
            self.num_filtered += 1
        else:
            self.num_unusable += 1


def survey_set(
    client: Client,
    config: Config,
    recipes: MediaRecipes,
    found: FoundSet,
    *,
    template: PromptTemplate | None,
    num_samples: int,
    num_first: int,
    advance: Callable[[int], None] = lambda num: None,
) -> Survey:
    """Look at samples of a set in the order of a run's first epoch, so those of a set that is not seen whole are drawn
    at random.

    `template`: makes token ids of prompts; None counts no tokens of texts. `num_samples`: at most those of the set.
    `num_first`: the number of samples that are kept to be shown. `advance` is called with the number of samples that
    were looked at since its last call.
    """
    run_set = found.run_set
    sets = (run_set,)
    start = RunStart(
        step=0,
        checkpoint=None,
        train_sets=sets if found.is_trained else (),
        eval_sets=() if found.is_trained else sets,
    )
    source = PromptSource(client, config, recipes, start, controller=0)
    seen = Survey(found=found)
    for flaw in found.bad:
        if seen.reasons.add(flaw.reason):
            seen.examples[flaw.reason] = f"{flaw.key or 'the file'} in {flaw.shard}"
    for slots in _chunks(run_set.name, run_set.num_samples, num_samples, config.run.seed):
        prompts, notices = source.load(slots)
        for notice in notices:
            seen.leave_out(notice)
        for prompt in prompts:
            _measure(seen, prompt, template)
        seen.num_usable += len(prompts)
        seen.first += prompts[: max(0, num_first - len(seen.first))]
        advance(len(slots))
    return seen


def percentiles(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Return (mean, minimum, median, 95th percentile, maximum) of some values."""
    numbers = np.asarray(values)
    return (
        float(numbers.mean()),
        float(numbers.min()),
        float(np.median(numbers)),
        float(np.percentile(numbers, 95)),
        float(numbers.max()),
    )


def _chunks(name: str, num_samples: int, num: int, seed: int) -> Iterator[list[Slot]]:
    for begin in range(0, num, CHUNK_SAMPLES):
        places = range(begin, min(begin + CHUNK_SAMPLES, num))
        yield [
            Slot(position=place, epoch=0, index=permuted(place, num_samples, seed, 0, name), set_name=name)
            for place in places
        ]


def _measure(seen: Survey, prompt: Prompt, template: PromptTemplate | None) -> None:
    sizes = [size_of(ref) for ref in prompt.media]
    if template is not None:
        with contextlib.suppress(TemplateError, ValueError):  # a fault of the template, which a run tells at its start
            seen.measures[PROMPT_TOKENS].append(len(template.token_ids(prompt.conversation, sizes)))
    seen.measures[ANSWER_CHARS].append(len(prompt.answer))
    seen.measures[MEDIA_TOKENS].append(sum(size.num_tokens for size in sizes))
    for kind, name in (("image", IMAGES), ("video", VIDEOS)):
        seen.measures[name].append(sum(size.kind == kind for size in sizes))
    for ref in prompt.media:
        _measure_medium(seen, ref)


def _measure_medium(seen: Survey, ref: Ref) -> None:
    height, width = ref.meta["source_size"]
    seen.measures[WIDTH].append(width)
    seen.measures[HEIGHT].append(height)
    seen.measures[PATCHES].append(math.prod(ref.meta["grid_thw"]))
    if kind_of(ref) == "video":
        seen.measures[FRAMES].append(len(ref.meta["frame_indices"]))
        seen.measures[SECONDS].append(ref.meta["duration"])
