"""Tests that a key which names a missing field is reported before anything heavy starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import load_config
from yatt_mm.preflight.first_sample import check_first_sample


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("first")
    runs.write_shard(folder / "train.tar", range(2))
    roots = {"train": [str(folder / "train.tar")]}
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node, Client(node.uri) as client:
        client.ingest("train")
        yield client


def check(client: Client, *overrides: str, key: str = "data.train") -> None:
    config, *rest = runs.arguments(Path("unused"), Path("unused"), "first", "train.steps=1", *overrides)
    check_first_sample(client, load_config(runs.ROOT / config, rest), key, "train")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.question_field=prompt", "set data.question_field"),
        ("data.answer_field=answer.truth", "set data.answer_field"),
        (
            "reward.judges.own.template='{response} or {fields[solution]}?'",
            r"the template wants fields\[solution\]; the sample has .*change reward\.judges\.own\.template",
        ),
    ],
)
def test_the_key_that_names_no_field_is_told(client: Client, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.train, first sample .*{message}"):
        check(client, "reward.judges.own.model=judge", override)


def test_what_is_there_passes_and_judges_see_no_held_out_sample(client: Client) -> None:
    judge = "reward.judges.own.model=judge"
    check(client, judge, "reward.judges.own.template='{response} or {fields[answer]}?'")
    check(client, judge, "reward.judges.own.template='{response} or {fields[solution]}?'", key="data.eval")
