"""The data sets of a run as a node finds them: how many samples they have, and of which layout the first ones are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataplane.client.client import Client
from dataplane.core.errors import DatasetError
from dataplane.core.refs import BadMedia, Sample
from dataplane.datasets.sampler import Source
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.sample_layouts import OWN, Layout, find_layout
from yatt_mm.config.data_section import FieldsSection, TrainSetSection
from yatt_mm.config.eval_section import EvalSetSection, held_out_key_of
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import HELD_OUT, TRAIN, RunSet
from yatt_mm.rewards.loading import absolute

NUM_LOOKED_AT = 16
"""The number of samples of which the first good one shows the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSet:
    """A data set of the config, and what the node found."""

    key: str
    """The key of the config that names the set, for messages."""
    pattern: str
    """Its files, or its name at the node of `dataplane.uri`, as the config has it."""
    run_set: RunSet
    first: Sample
    """Its first sample, whatever it is like."""
    bad: Sequence[BadMedia]
    """The shards and members that could not be indexed."""

    @property
    def is_trained(self) -> bool:
        """True for a training set."""
        return self.key.startswith("data.train")


def find_train_sets(client: Client, config: Config) -> list[FoundSet]:
    """Index the training sets of a run, and see their layouts.

    Raises:
        ConfigError: one of them cannot be used.
    """
    return [
        _find(client, config, key_of(one), one.name, root_of(one), one.path, one.fields, one.reward)
        for one in config.data.train
    ]


def find_held_out_sets(client: Client, config: Config) -> list[FoundSet]:
    """Index the held-out sets of a run, and see their layouts.

    Raises:
        ConfigError: one of them cannot be used.
    """
    found = []
    for name, one in held_out_sections(config).items():
        root = held_out_root_of(name)
        indexed = _find(client, config, held_out_key_of(name), name, root, one.path, one.fields, one.reward)
        num_samples = indexed.run_set.num_samples
        run_set = replace(indexed.run_set, num_samples=min(num_samples, one.num_prompts or num_samples))
        found.append(replace(indexed, run_set=run_set))
    return found


def held_out_sections(config: Config) -> dict[str, EvalSetSection]:
    """Return the settings of the held-out sets by name: that of `data.eval`, and those of `eval.sets`."""
    first = {}
    if config.data.eval is not None:
        first = {HELD_OUT: EvalSetSection(path=config.data.eval, num_prompts=config.data.num_eval_samples)}
    return first | config.eval.sets


def sources_of(config: Config, found: Sequence[FoundSet]) -> list[Source]:
    """Return the training sets as sources of prompts."""
    return [
        Source(dataset=one.name, num_samples=of.run_set.num_samples, weight=one.weight)
        for one, of in zip(config.data.train, found, strict=True)
    ]


def key_of(section: TrainSetSection) -> str:
    """Return the key of the config that names a training set."""
    return "data.train" if section.name == TRAIN else f"data.train[{section.name}]"


def root_of(section: TrainSetSection) -> str:
    """Return the name of a training set at the run's own node."""
    return TRAIN if section.name == TRAIN else f"{TRAIN}.{section.name}"


def held_out_root_of(name: str) -> str:
    """Return the name of a held-out set at the run's own node."""
    return HELD_OUT if name == HELD_OUT else f"{HELD_OUT}.{name}"


def pattern_of(section: TrainSetSection | EvalSetSection) -> str:
    """Return the pattern of a set's files, with the columns of media that the config names."""
    if not section.fields.media:
        return section.path
    has_options = "=" in section.path.rpartition("#")[2] and "#" in section.path
    return f"{section.path}{'&' if has_options else '#'}media={','.join(section.fields.media)}"


def _find(
    client: Client,
    config: Config,
    key: str,
    name: str,
    root: str,
    pattern: str,
    fields: FieldsSection,
    reward: str | None,
) -> FoundSet:
    dataset = root if config.dataplane.uri is None else pattern
    try:
        found = client.ingest(dataset)
    except DatasetError as error:
        raise ConfigError(f"{key}: {error}") from error
    question = fields.question or config.data.question_field
    answer = fields.answer or config.data.answer_field
    samples = client.samples(dataset, range(min(NUM_LOOKED_AT, found.num_samples)))
    layout = _layout_of(samples, key, question, answer)
    run_set = RunSet(
        name=name,
        dataset=dataset,
        num_samples=found.num_samples,
        layout=layout,
        reward=absolute(reward or config.reward.function or layout.reward),
    )
    return FoundSet(key=key, pattern=pattern, run_set=run_set, first=samples[0], bad=found.bad)


def _layout_of(samples: Sequence[Sample], key: str, question: str | None, answer: str | None) -> Layout:
    """Return the layout of the first sample that has fields; its media may be bad."""
    good = next((sample for sample in samples if sample.fields), None)
    if good is None:  # what is wrong with the samples is told when they are looked at as prompts
        return replace(OWN, question=question or OWN.question, answer=answer or OWN.answer)
    try:
        return find_layout(good.fields, question=question, answer=answer)
    except ValueError as error:
        raise ConfigError(
            f"{key}, first sample ({good.shard} {good.key}): {error}; name the fields with data.question_field and "
            "data.answer_field, or, in a list of sets, with fields: {question: ..., answer: ...}"
        ) from error
