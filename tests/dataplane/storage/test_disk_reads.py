"""Tests that a file which cannot be read any more is an error that names it, and never ends the node."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import ChecksumError, OverloadedError
from dataplane.core.json_body import dump
from dataplane.core.refs import Ref
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.shards import RECIPE, encode, noise, wait_until, write_shard

MIB = 1 << 20


def only_file(folder: Path) -> Path:
    (path,) = (folder / "spill").iterdir()
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_shard(tmp_path / "a.tar", {f"{at:03d}": encode(noise(at)) for at in range(2)})
    return tmp_path / "a.tar"


@pytest.mark.parametrize("many", [False, True], ids=["one object", "many objects"])
def test_a_file_that_is_cut_while_it_is_sent_is_an_error_that_names_it_and_the_node_goes_on(
    tmp_path: Path, many: bool
) -> None:
    size = 24 * MIB
    with (
        EmbeddedNode(memory_bytes=32 * MIB, roots={}, spill_dir=tmp_path, spill_bytes=64 * MIB) as node,
        Client(node.uri, timeout_s=20) as client,
        fl.FlightClient(node.uri) as flight,
    ):
        pid = node.pid
        ref = client.put(np.full(size, 7, np.uint8), name="cut")
        other = client.put(bytes(size), name="other")
        path = only_file(tmp_path)
        ticket = client.ticket(ref) if not many else fl.Ticket(dump({"refs": [ref.to_dict()]}))
        stream = flight.do_get(ticket)
        stream.read_chunk()
        os.truncate(path, 5 * MIB)
        with pytest.raises(pa.ArrowException, match=f"cut: {path} was removed, cut short or replaced"):
            stream.read_all()
        with Reader(node.uri, timeout_s=20) as reader, pytest.raises(ChecksumError, match=r"cut is lost.*put it again"):
            reader.resolve([ref])
        assert client.get(other) == bytes(size) and node.pid == pid


@pytest.fixture
def node(tmp_path: Path, shard: Path) -> Iterator[Node]:
    """A node in this process, with 1 MiB of memory and 8 MiB of disk."""
    roots = {"a": [str(shard)]}
    config = NodeConfig(memory_bytes=MIB, spill_dir=tmp_path / "disk", spill_bytes=8 * MIB, roots=roots)
    running = Node(config)
    yield running
    running.stop()


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(node.uri, timeout_s=30) as opened:
        yield opened


def spilled(node: Node, client: Client) -> tuple[Ref, Path, np.ndarray]:
    """Return a derived object whose bytes are on disk only, its file, and its bytes."""
    (ref,) = client.derive([client.samples("a", [0])[0].media[0]], RECIPE)
    assert isinstance(ref, Ref)
    entry = node.services.store.find(ref.name)
    assert entry is not None
    pixels = node.services.store.content(entry).copy()
    client.release([client.put(bytes(MIB), name="flood")])
    assert entry.slab is None and entry.file is not None
    return ref, entry.file.path, pixels


@pytest.mark.parametrize("harm", ["cut", "unreadable"])
def test_an_object_with_lineage_is_made_again_if_its_file_cannot_be_read(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    ref, path, pixels = spilled(node, client)
    with Reader(node.uri, timeout_s=30) as reader, monkeypatch.context() as patched:
        if harm == "cut":
            os.truncate(path, 5000)
        else:
            patched.setattr(os, "preadv", bad_sector)
        assert np.array_equal(reader.resolve([ref])[0].reshape(-1), pixels)
        assert client.stat()["num_recomputed"] == 1
    wait_until(lambda: client.stat()["num_leases"] == 0)
    assert not path.exists()


def test_a_plain_object_whose_file_cannot_be_read_now_is_an_error_that_names_it_and_stays(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = client.put(b"plain" * 1000, name="plain")
    client.release([client.put(bytes(MIB), name="flood")])
    entry = node.services.store.find("plain")
    assert entry is not None and entry.file is not None
    with Reader(node.uri, timeout_s=30) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", bad_sector)
            with pytest.raises(OverloadedError, match=f"{entry.file.path} cannot be read now"):
                reader.resolve([ref])
        assert reader.resolve([ref])[0].tobytes() == b"plain" * 1000


def bad_sector(fd: int, buffers: Any, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
