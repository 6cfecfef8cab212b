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
from yatt_mm.config.data_section import TrainSetSection
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
    return [find_train_set(client, config, one) for one in config.data.train]


def find_held_out_sets(client: Client, config: Config) -> list[FoundSet]:
    """Index the held-out sets of a run, and see their layouts.

    Raises:
        ConfigError: one of them cannot be used.
    """
    return [find_held_out_set(client, config, name, one) for name, one in held_out_sections(config).items()]


def find_train_set(client: Client, config: Config, section: TrainSetSection) -> FoundSet:
    """Index a training set of a run, and see its layout.

    Raises:
        ConfigError: it cannot be used.
    """
    return _find(client, config, section, key=key_of(section), name=section.name, root=root_of(section))


def find_held_out_set(client: Client, config: Config, name: str, section: EvalSetSection) -> FoundSet:
    """Index a held-out set of a run, and see its layout.

    Raises:
        ConfigError: it cannot be used.
    """
    found = _find(client, config, section, key=held_out_key_of(name), name=name, root=held_out_root_of(name))
    num_samples = found.run_set.num_samples
    num_prompts = min(num_samples, section.num_prompts or num_samples)
    return replace(found, run_set=replace(found.run_set, num_samples=num_prompts))


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
    client: Client, config: Config, section: TrainSetSection | EvalSetSection, *, key: str, name: str, root: str
) -> FoundSet:
    dataset = root if config.dataplane.uri is None else section.path
    try:
        found = client.ingest(dataset)
    except DatasetError as error:
        raise ConfigError(f"{key}: {error}") from error
    question = section.fields.question or config.data.question_field
    answer = section.fields.answer or config.data.answer_field
    samples = client.samples(dataset, range(min(NUM_LOOKED_AT, found.num_samples)))
    layout = _layout_of(samples, key, question, answer)
    run_set = RunSet(
        name=name,
        dataset=dataset,
        num_samples=found.num_samples,
        layout=layout,
        reward=absolute(section.reward or config.reward.function or layout.reward),
    )
    return FoundSet(key=key, pattern=section.path, run_set=run_set, first=samples[0], bad=found.bad)


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
