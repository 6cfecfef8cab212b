"""Checks that a data set's first sample has the fields that the config names. A wrong name would fail for every
sample."""

from __future__ import annotations

from dataplane.client.client import Client
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.sample_fields import take_field
from yatt_mm.config.judge_section import judge_spec
from yatt_mm.config.run_config import Config


def check_first_sample(client: Client, config: Config, key: str, name: str) -> None:
    """Check question and answer, and in `data.train` the fields that judges' templates name.

    Raises:
        ConfigError: with the key of the config that names a field which is not there.
    """
    sample = client.samples(name, [0])[0]
    if sample.bad:
        return
    where = f"{key}, first sample ({sample.shard} {sample.key})"
    for option, field in (
        ("data.question_field", config.data.question_field),
        ("data.answer_field", config.data.answer_field),
    ):
        try:
            take_field(sample.fields, field)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; set {option}") from error
    if key != "data.train":
        return
    for judge, section in config.reward.judges.items():
        template = judge_spec(judge, section, config.data.video.sampling()).template
        try:
            template.fill(question="", response="", answer="", fields=sample.fields)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; change reward.judges.{judge}.template") from error
