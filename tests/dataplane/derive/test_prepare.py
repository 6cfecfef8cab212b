"""Tests of preparing samples: one call gives their fields and the refs of their derived media, in the order that was
asked for."""

import json
from collections.abc import Iterator

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.errors import BadRequestError
from dataplane.core.refs import Ref
from dataplane.derive.prepare import WINDOW_SAMPLES
from tests.dataplane.shards import RECIPE, encode, noise, write_tar

NUM_SAMPLES = 3 * WINDOW_SAMPLES + 1
BAD = 20


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a node with samples of two images each; one image of sample `BAD` is bad."""
    members: dict[str, bytes] = {}
    for at in range(NUM_SAMPLES):
        members[f"{at:03d}.a.png"] = encode(noise(at))
        members[f"{at:03d}.b.png"] = b"no image" if at == BAD else encode(noise(1000 + at))
        members[f"{at:03d}.json"] = json.dumps({"n": at}).encode()
    shard = write_tar(tmp_path_factory.mktemp("prepare") / "two.tar", members)
    with EmbeddedNode(memory_bytes=16 << 20, roots={"two": [str(shard)]}) as node, Client(node.uri) as opened:
        yield opened


def test_samples_come_with_derived_media_in_their_order(client: Client) -> None:
    indices = [*range(NUM_SAMPLES - 1, -1, -1), 3, 3]
    prepared = client.prepare("two", indices, {"image": RECIPE})
    plain = client.samples("two", indices)
    assert [sample.fields["n"] for sample in prepared] == indices
    assert [(sample.key, sample.shard) for sample in prepared] == [(sample.key, sample.shard) for sample in plain]
    for sample, source in zip(prepared, plain, strict=True):
        if source.index != BAD:
            assert list(sample.media) == client.derive(source.media, RECIPE) and sample.bad == ()
    bad = next(sample for sample in prepared if sample.index == BAD)
    assert len(bad.media) == 1 and len(bad.bad) == 1 and "not an image" in bad.bad[0].reason
    assert bad.media[0].lineage == client.derive(plain[indices.index(BAD)].media[:1], RECIPE)[0].lineage  # type: ignore[union-attr]


def test_one_call_is_one_round_trip_and_a_prefetched_sample_is_made_once(client: Client) -> None:
    recipe = {"image": {**RECIPE, "min_pixels": 90 * 90}}
    before = client.stat()
    assert client.prefetch("two", range(4), recipe) == 4
    prepared = client.prepare("two", range(4), recipe)
    after = client.stat()
    assert all(isinstance(ref, Ref) for sample in prepared for ref in sample.media)
    assert after["num_processed"] - before["num_processed"] == 8
    calls = {
        verb: counts["num_calls"] - before["verbs"].get(verb, {}).get("num_calls", 0)
        for verb, counts in after["verbs"].items()
    }
    assert {verb: count for verb, count in calls.items() if count} == {"prepare": 1, "prefetch": 1, "stat": 1}


def test_a_kind_without_a_recipe_is_bad_and_an_unknown_kind_is_refused(client: Client) -> None:
    (sample,) = client.prepare("two", [0], {})
    assert sample.media == () and "no recipe for images was given" in sample.bad[0].reason
    with pytest.raises(BadRequestError, match=r"prepare\.recipes has 'sound'; wanted a recipe for each"):
        client.prepare("two", [0], {"sound": RECIPE})
    with pytest.raises(BadRequestError, match="sample 1000 of dataset 'two'"):
        client.prepare("two", [1000], {"image": RECIPE})
