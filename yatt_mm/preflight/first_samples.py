"""Looks at the first samples of a data set as the run will use them: their fields, their media, and the limits of a
prompt. What is wrong with all of them is wrong with the config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dataplane.client.client import Client
from dataplane.datasets.permutation import permuted
from models.recipes.media_recipes import MediaRecipes
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.reasons import Reasons
from yatt_mm.common.sample_fields import take_field
from yatt_mm.config.data_section import FilterSection
from yatt_mm.config.judge_section import judge_spec
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.preflight.first_prompts import check_prompts
from yatt_mm.preflight.run_sets import FoundSet
from yatt_mm.protocol.control import Prompt, RunSet, RunStart, Slot

NUM_FIRST = 8
"""The number of samples whose media are made, if one of them can be used."""
NUM_BAD = 100
"""The number of samples that are looked at before a set without a usable one is refused."""
SUFFIXES = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "videos": (".mp4", ".webm", ".mkv", ".mov", ".avi"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSamples:
    """What the first samples of a data set are like."""

    prompt: Prompt
    """The first one that can be used."""
    words: str
    """Which media they have, and what is noticeable."""


def check_first_samples(client: Client, config: Config, recipes: MediaRecipes, found: FoundSet) -> FirstSamples:
    """Check the first samples of a data set, and return what they are like.

    Raises:
        ConfigError: none of them can be used, a field is missing, or a field holds paths of media that are not read.
    """
    key, run_set = found.key, found.run_set
    _check_fields(config, found)
    # neither filters nor shuffles: what a filter leaves out is no fault of the set, and the next sample takes its place
    start = RunStart(step=0, checkpoint=None, train_sets=(), eval_sets=(run_set,))
    source = PromptSource(client, config, recipes, start, controller=0)
    prompts, notices = _first_usable(source, run_set, lambda place: place)
    if not prompts:
        if not found.first.media and "placeholders" in notices[0]["reason"]:
            _check_no_paths(found.first.fields, config, found)
        raise ConfigError(f"{key}: none of the first {len(notices)} samples can be used{_why(notices)}")
    if found.is_trained:
        _check_filter(client, config, recipes, found)
    check_prompts(config, prompts, key)
    media: Counter[str] = Counter(kind_of(ref) for prompt in prompts for ref in prompt.media)
    if not media:
        _check_no_paths(prompts[0].fields, config, found)
    words = _in_words(media, len(prompts))
    if num_without := sum(not prompt.question.text.strip() for prompt in prompts):
        words += f"; without text in the question: {num_without} of the first {len(prompts)} usable samples"
    if num_without := sum(not prompt.answer.strip() for prompt in prompts):
        words += f"; with an empty answer: {num_without} of the first {len(prompts)} usable samples"
    if notices:
        num = len(prompts) + len(notices)
        words += f"; of the first {num} samples {len(notices)} cannot be used{_why(notices)}"
    return FirstSamples(prompt=prompts[0], words=words)


def _check_filter(client: Client, config: Config, recipes: MediaRecipes, found: FoundSet) -> None:
    """Check that `data.filter` leaves something of a training set."""
    if config.data.filter == FilterSection():
        return
    run_set = found.run_set
    start = RunStart(step=0, checkpoint=None, train_sets=(run_set,), eval_sets=())
    source = PromptSource(client, config, recipes, start, controller=0)
    prompts, notices = _first_usable(  # in the order of a run: files may be sorted by length
        source, run_set, lambda place: permuted(place, run_set.num_samples, config.run.seed, 0, run_set.name)
    )
    if prompts:
        return
    num = sum(notice["is_filtered"] for notice in notices)
    raise ConfigError(
        f"{found.key}: of {len(notices)} samples at random data.filter leaves out {num}, and no other can be "
        f"used{_why(notices)}; widen data.filter, or leave it out"
    )


def _first_usable(
    source: PromptSource, run_set: RunSet, index_of: Callable[[int], int]
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Return the usable prompts of the first portion of samples that has one, and the notices of all samples before
    and beside them. `index_of`: the sample at a place of the order in which they are looked at."""
    notices: list[dict[str, Any]] = []
    for places in _portions(run_set.num_samples):
        slots = [Slot(position=place, epoch=0, index=index_of(place), set_name=run_set.name) for place in places]
        prompts, left_out = source.load(slots)
        notices += left_out
        if prompts:
            return prompts, notices
    return [], notices


def _portions(num_samples: int) -> Iterator[range]:
    """Yield the numbers of the first samples, then those of the next if none of the first can be used."""
    for begin in range(0, min(num_samples, NUM_BAD), NUM_FIRST):
        yield range(begin, min(begin + NUM_FIRST, num_samples, NUM_BAD))


def _why(notices: Sequence[Mapping[str, Any]]) -> str:
    reasons = Reasons()
    for notice in notices:
        reasons.add(notice["reason"])
    reason, count = reasons.commonest()
    first = next(notice for notice in notices if notice["reason"] == reason)
    share = "" if count == len(notices) else f", {count} of them"
    return f"{share} because: {reason} (the first is {first['key']} in {first['shard']})"


def _in_words(media: Mapping[str, int], num_prompts: int) -> str:
    """Return the mean number of each kind of media per sample, such as `2 images each`."""
    if not media:
        return "no media"
    means = {kind: count / num_prompts for kind, count in media.items()}
    return ", ".join(f"{mean:.3g} {kind}{'' if mean == 1 else 's'}" for kind, mean in means.items()) + " each"


def _check_fields(config: Config, found: FoundSet) -> None:
    """Check question and answer of the first sample, and in training sets the fields that judges' templates name."""
    sample = found.first
    if sample.bad:
        return
    where, layout = f"{found.key}, first sample ({sample.shard} {sample.key})", found.run_set.layout
    for option, field in (("data.question_field", layout.question), ("data.answer_field", layout.answer)):
        try:
            take_field(sample.fields, field) if field else None
        except ValueError as error:
            if not sample.fields and sample.shard.endswith(".tar"):
                raise ConfigError(
                    f"{where}: the sample has no members with fields (.json, .txt, .cls, .npy). The members of a "
                    "sample must stand one after another in the tar, with the same name before the first dot "
                    "(tar --sort=name)"
                ) from error
            own = option.removeprefix("data.").removesuffix("_field")
            raise ConfigError(
                f"{where}: {error}; set {option}, or for this set alone fields: {{{own}: ...}}, which counts first"
            ) from error
    if not found.is_trained:
        return
    for judge, section in config.reward.judges.items():
        template = judge_spec(judge, section, config.data.video.sampling()).template
        try:
            template.fill(question=ask(""), response="", answer="", fields=sample.fields)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; change reward.judges.{judge}.template") from error


def _check_no_paths(fields: Mapping[str, Any], config: Config, found: FoundSet) -> None:
    """Check that no field of a sample without media looks like the path of a medium."""
    key = found.key
    for name, value in fields.items():
        first = value[0] if isinstance(value, list) and value else value
        suffix = PurePosixPath(first).suffix.lower() if isinstance(first, str) else ""
        kinds = [kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes]
        if not kinds:
            continue
        if config.dataplane.uri is not None:
            remedy = f"#media={name} at the end of the root with which the node was started"
            other = f"#drop={name} there"
        elif "[" in key:
            remedy, other = f"fields: {{media: [{name}]}} of the set", f"#drop={name} at the end of its path"
        else:
            remedy, other = f"{key}='{found.pattern}#media={name}'", f"#drop={name}"
        raise ConfigError(
            f"{key}: the samples have no media, but {name} holds paths of {kinds[0]} ({str(first)[:80]!r}). Name it "
            f"with {remedy} (in a tar, put each file beside its .json instead), or leave the column out with {other}"
        )
