"""Fixtures with a real node, one for each test module that uses it, with a good shard and a bad one."""

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.client import node_process
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from tests.dataplane.shards import encode, noise, wait_until, write_shard


@pytest.fixture(scope="module")
def shard_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `good-000.tar` (12 images), `good-001.tar` (4 images, the first equal to sample 0) and
    `bad-000.tar`."""
    directory = tmp_path_factory.mktemp("shards")
    good = {f"{at:03d}": encode(noise(at)) for at in range(12)}
    write_shard(directory / "good-000.tar", good)
    write_shard(
        directory / "good-001.tar", {"100": good["000"]} | {f"{at}": encode(noise(at)) for at in (101, 102, 103)}
    )
    bad = {
        "fine": encode(noise(200)),
        "torn": encode(noise(201))[:-200],
        "empty": b"",
        "text": b"this is not an image",
        "jpeg": encode(noise(202), "JPEG"),
        "thin": encode(noise(203, height=1, width=300)),
        "last": encode(noise(204)),
    }
    write_shard(directory / "bad-000.tar", bad)
    return directory


@pytest.fixture(scope="module")
def node(shard_dir: Path) -> Iterator[EmbeddedNode]:
    """A node of 16 MiB with the datasets `good` and `bad`."""
    gc.collect()
    gc.freeze()  # the libraries that earlier tests loaded: to look through them takes 0.2 s for each of these tests
    roots = {"good": [f"{shard_dir}/good-*.tar"], "bad": [f"{shard_dir}/bad-*.tar"]}
    with EmbeddedNode(memory_bytes=16 << 20, roots=roots, num_workers=2) as started:
        yield started


@pytest.fixture
def started_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the nodes of a test be started as those of a run are, and not forked."""
    monkeypatch.setattr(node_process, "subprocess", subprocess)


@pytest.fixture
def quiet_node(node: EmbeddedNode) -> EmbeddedNode:
    """The module's node, after it has noticed that the readers and streams of the previous test have ended."""
    gc.collect()  # views in the frames of errors that were expected
    with Client(node.uri, timeout_s=30) as client:
        wait_until(lambda: (client.stat()["num_leases"], client.stat()["num_readers"]) == (0, 0))
    return node


@pytest.fixture
def client(quiet_node: EmbeddedNode) -> Iterator[Client]:
    """A client of the module's node."""
    with Client(quiet_node.uri, timeout_s=30) as opened:
        yield opened


@pytest.fixture
def reader(quiet_node: EmbeddedNode) -> Iterator[Reader]:
    """A reader of the module's node."""
    with Reader(quiet_node.uri, timeout_s=30) as opened:
        yield opened
