"""Tests of several nodes on one machine that share no memory: each object comes from its home once, whole and
verified."""

import json
import re
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as fl
import pytest

from benchmarks.common.proxy import Proxy
from dataplane.cli.main import build_parser
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, ChecksumError, DataPlaneError, MissingObjectError, PeerError
from dataplane.core.refs import Ref
from tests.dataplane.serving import refused, serving
from tests.dataplane.shards import encode, noise, wait_until, write_shard

RECIPE = {
    "kernel": "qwen_vl_patches",
    "version": 1,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 1003520,
    "resample": "bicubic",
}


@pytest.fixture(scope="module")
def home(shard_dir: Path) -> Iterator[EmbeddedNode]:
    """Node `a`, which has the datasets."""
    with EmbeddedNode(
        memory_bytes=96 << 20, roots={"good": [f"{shard_dir}/good-*.tar"]}, node_id="a", host_id="host-a"
    ) as started:
        yield started


@pytest.fixture
def proxy(home: EmbeddedNode) -> Iterator[Proxy]:
    with Proxy(home.uri) as opened:
        yield opened


@pytest.fixture
def away(proxy: Proxy) -> Iterator[EmbeddedNode]:
    """Node `b`, which knows only the address of node `a`."""
    with EmbeddedNode(memory_bytes=96 << 20, roots={}, node_id="b", peers={"a": proxy.uri}) as started:
        yield started


@pytest.fixture
def owner(home: EmbeddedNode) -> Iterator[Client]:
    with Client(home.uri, timeout_s=30) as opened:
        yield opened


def put_many(client: Client, sizes: list[int], prefix: str) -> tuple[list[np.ndarray], list[Ref]]:
    rng = np.random.default_rng(len(sizes))
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    return arrays, [client.put(array, name=f"{prefix}/{at}") for at, array in enumerate(arrays)]


def test_readers_of_one_host_fetch_each_object_once(owner: Client, away: EmbeddedNode, proxy: Proxy) -> None:
    sizes = [4096 * (1 + at % 64) for at in range(100)]
    arrays, refs = put_many(owner, sizes, "once")

    def read(number: int) -> list[np.ndarray]:
        with Reader(away.uri, timeout_s=60) as reader:
            order = np.random.default_rng(number).permutation(len(refs))
            views = reader.resolve([refs[at] for at in order])
            assert all(np.array_equal(view, arrays[at]) for view, at in zip(views, order, strict=True))
            return views

    with ThreadPoolExecutor(8) as threads:
        views = list(threads.map(read, range(8)))
    assert sum(sizes) < proxy.num_bytes < 1.05 * sum(sizes) + 200_000
    with Client(away.uri) as client:
        assert client.stat()["num_fetched"] == len(refs)
        assert client.stat()["fetched_bytes"] == sum(sizes)
    del views
    owner.release(refs)


def test_a_big_object_comes_in_ranges_over_as_many_connections_as_its_node_may_open(
    owner: Client, proxy: Proxy, tmp_path: Path
) -> None:
    arrays, refs = put_many(owner, [(20 << 20) + 4321], "big")
    before = num_gets(owner)
    flags = ("--memory", "96MiB", "--node-id", "b", "--peer", f"a={proxy.uri}", "--peer-streams", "3")
    with serving(tmp_path / "log", *flags) as away, Reader(away.uri, timeout_s=60) as reader:
        (view,) = reader.resolve(refs)
        assert np.array_equal(view, arrays[0])
        assert proxy.num_connections == 3
    wait_until(lambda: num_gets(owner) == before + 3)
    owner.release(refs)


def num_gets(client: Client) -> int:
    """Return the number of DoGet calls that a node has answered."""
    return client.stat()["verbs"].get("DoGet", {}).get("num_calls", 0)


@pytest.mark.parametrize("sizes", [[300 << 10] * 20, [(24 << 20) + 1]], ids=["many", "ranges"])
def test_a_cut_in_the_middle_is_made_good_and_no_tensor_is_short(
    owner: Client, away: EmbeddedNode, proxy: Proxy, sizes: list[int]
) -> None:
    arrays, refs = put_many(owner, sizes, "cut")
    proxy.cut_after = sum(sizes) // 2
    with Reader(away.uri, timeout_s=60) as reader:
        views = reader.resolve(refs)
    assert proxy.num_cuts == 1
    assert all(np.array_equal(view, array) for view, array in zip(views, arrays, strict=True))
    with Client(away.uri) as client:
        assert client.stat()["num_fetch_retries"] >= 1
        assert client.stat()["used_bytes"] < sum(sizes) + len(sizes) * 4096
    owner.release(refs)


def test_a_home_that_stays_away_is_an_error_that_says_who_where_and_how_long(
    owner: Client, away: EmbeddedNode, proxy: Proxy
) -> None:
    _, refs = put_many(owner, [1 << 20] * 4, "gone")
    proxy.cut_after = 1 << 20
    proxy.is_refusing = True
    with Reader(away.uri, timeout_s=60) as reader:
        reader.timeout_s = 3
        started = time.monotonic()
        with pytest.raises(PeerError, match=rf"gone/\d .* node a at {proxy.uri}, in \d+\.\d s .* raise timeout_s"):
            reader.resolve(refs)
        assert time.monotonic() - started < 30
        proxy.is_refusing = False
        reader.timeout_s = 60
        assert len(reader.resolve(refs)) == 4  # the reader and both nodes work on
    owner.release(refs)


def test_a_missing_object_says_so_and_an_unknown_home_says_which_are_known(owner: Client, away: EmbeddedNode) -> None:
    _, refs = put_many(owner, [100], "missing")
    owner.release(refs)
    with Client(away.uri, timeout_s=30) as client:
        with pytest.raises(MissingObjectError, match="missing/0 is not on node a: "):
            client.get(refs[0])
    with EmbeddedNode(memory_bytes=1 << 20, roots={}, node_id="c", peers={"x": "grpc://127.0.0.1:1"}) as node:
        with Client(node.uri, timeout_s=30) as client:
            with pytest.raises(
                MissingObjectError,
                match=r"home 'a' is not known here \(known: x\)\. If that node has ended, the object ended with it: "
                r"store such objects with durable=True .*--spill.*--peer a=.*--dir",
            ):
                client.get(refs[0])


@pytest.mark.parametrize("proxy", [True], indirect=True)  # what it derives, the home has from then on
def test_sources_and_derived_objects_come_from_their_home_too(owner: Client, away: EmbeddedNode) -> None:
    owner.ingest("good")
    sources = [sample.media[0] for sample in owner.samples("good", [3, 4])]
    derived = owner.derive(sources, RECIPE)
    by_hand = owner.put_source(encode(noise(77)))
    assert all(isinstance(ref, Ref) for ref in derived)
    with Reader(away.uri, timeout_s=60) as reader, Client(away.uri, timeout_s=60) as client:
        views = reader.resolve([*sources, *derived, by_hand])  # type: ignore[list-item]
        for ref, view in zip(sources, views, strict=False):
            assert "s/" + content_digest(view.data) == ref.name
        assert content_digest(views[2].data) == derived[0].meta["checksum"]  # type: ignore[union-attr]
        made = client.derive([by_hand], RECIPE)[0]
        assert isinstance(made, Ref) and made.node == "b"
        others = [sample.media[0] for sample in owner.samples("good", [5, 6])]
        fetched = client.derive(others, RECIPE)
        assert [ref.name for ref in fetched] == [ref.name for ref in owner.derive(others, RECIPE)]  # type: ignore[union-attr]
        assert client.stat()["num_processed"] == 3
    owner.release([by_hand])


def test_what_the_home_does_not_give_is_made_here_where_that_is_possible(tmp_path: Path) -> None:
    write_shard(tmp_path / "x-000.tar", {f"{at:03d}": encode(noise(at)) for at in range(3)})
    roots = {"x": [f"{tmp_path}/x-*.tar"]}
    with EmbeddedNode(memory_bytes=8 << 20, roots=roots, node_id="a", restart=False) as first:
        with Client(first.uri) as client:
            client.ingest("x")
            derived = client.derive([sample.media[0] for sample in client.samples("x", [0, 1, 2])], RECIPE)
        uri = first.uri
    with EmbeddedNode(memory_bytes=8 << 20, roots=roots, node_id="b", peers={"a": uri}) as second:
        with Client(second.uri) as client, Reader(second.uri, timeout_s=40) as reader:
            client.ingest("x")
            views = reader.resolve(derived)  # type: ignore[arg-type]
            assert [content_digest(view.data) for view in views] == [
                ref.meta["checksum"]  # type: ignore[union-attr]
                for ref in derived
            ]
            assert client.stat()["num_processed"] == 3


def test_nodes_find_each_other_in_a_directory_also_after_one_moved(tmp_path: Path) -> None:
    directory = tmp_path / "nodes"
    directory.mkdir(mode=0o700)
    array = np.arange(1000, dtype=np.int64)
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="b", directory=directory) as here:
        with Reader(here.uri, timeout_s=30) as reader:
            for turn in range(2):  # on another port each time
                with EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="a", directory=directory) as there:
                    with Client(there.uri) as client:
                        ref = client.put(array + turn, name=f"moved/{turn}", dtype="int64")
                    assert np.array_equal(reader.resolve([ref])[0], array + turn)
    assert list(directory.iterdir()) == []


def test_two_living_nodes_cannot_have_one_id_in_one_directory(tmp_path: Path) -> None:
    first, second = (PeerDirectory("a", {}, tmp_path) for _ in range(2))
    tmp_path.chmod(0o700)
    (tmp_path / "a.json").write_text("{}")  # of a run that was killed
    first.announce("grpc://127.0.0.1:1", "host", "1")
    with pytest.raises(BadRequestError, match="a node with the id a runs already"):
        second.announce("grpc://127.0.0.1:2", "host", "2")
    assert PeerDirectory("b", {}, tmp_path).find("a") == "grpc://127.0.0.1:1"
    second.withdraw()
    first.withdraw()
    assert list(tmp_path.iterdir()) == []
    second.announce("grpc://127.0.0.1:2", "host", "2")
    assert PeerDirectory("b", {}, tmp_path).find("a") == "grpc://127.0.0.1:2"
    second.withdraw()


def test_a_node_of_every_address_says_by_which_others_reach_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    message = refused("--host", "0.0.0.0", "--insecure", "--directory", str(tmp_path))
    assert "would tell other nodes 0.0.0.0" in message and "--advertise" in message
    with serving(tmp_path / "log", "--host", "0.0.0.0", "--insecure") as served:
        uri = served.uri.replace("0.0.0.0", "127.0.0.1")
        with Client(uri, timeout_s=20) as client, fl.FlightClient(uri) as flight:
            client.put(b"some", name="some")
            (endpoint,) = flight.get_flight_info(fl.FlightDescriptor.for_path("some")).endpoints
            assert [location.uri for location in endpoint.locations] == [b"arrow-flight-reuse-connection://?"]


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    for mode in (0o770, 0o707, 0o1777):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        with pytest.raises(BadRequestError, match="no other user who may write: chmod 700"):
            PeerDirectory("a", {}, directory)
    directory.chmod(0o700)
    peers = PeerDirectory("a", {}, directory)
    entry = directory / "b.json"
    for text in ("", "[]", '{"node": "c", "uri": "grpc://1.1.1.1:1"}', '{"node": "b", "uri": 5}'):
        entry.write_text(text)
        assert peers.find("b") is None
    entry.write_text('{"node": "b", "uri": "grpc://1.1.1.1:1"}')
    entry.chmod(0o666)
    assert peers.find("b") is None
    entry.chmod(0o600)
    assert (peers.find("b"), peers.find("../b"), peers.known()) == ("grpc://1.1.1.1:1", None, ["b"])


def test_a_name_that_was_written_again_at_home_is_fetched_again(owner: Client, away: EmbeddedNode) -> None:
    with Reader(away.uri, timeout_s=30) as reader:
        for content in (1, 2):
            ref = owner.put(np.full(5000, content, np.uint8), name="again/x")
            (view,) = reader.resolve([ref])
            assert (view == content).all()
            owner.release([ref])


def test_a_copy_goes_only_when_its_home_confirms_that_it_was_written_again(
    owner: Client, away: EmbeddedNode, proxy: Proxy
) -> None:
    ref = owner.put(bytes(5000), name="forged/x")
    with Reader(away.uri, timeout_s=30) as reader, Client(away.uri, timeout_s=30) as client:
        reader.resolve([ref])
        fetched = client.stat()["num_fetched"]
        with pytest.raises(ChecksumError):
            reader.resolve([replace(ref, version=5)])
        assert reader.resolve([ref])[0].nbytes == 5000
        assert client.stat()["num_fetched"] == fetched, "a forged ref made the node drop its copy"
    owner.release([ref])


def test_a_source_that_its_home_no_longer_has_is_an_error_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "nodes"
    directory.mkdir(mode=0o700)
    common: dict[str, Any] = {"memory_bytes": 4 << 20, "roots": {}, "directory": directory}
    with EmbeddedNode(**common, node_id="a") as first, EmbeddedNode(**common, node_id="b") as second:
        with Client(first.uri, timeout_s=60) as one, Client(second.uri, timeout_s=60) as other:
            ref = one.put_source(encode(noise(5)))
            one.release([ref])
            started = time.monotonic()
            one.put(bytes(4 << 20), name="filler")  # so that the source is evicted
            with pytest.raises(DataPlaneError):
                other.get(ref)
            assert time.monotonic() - started < 30


def test_a_node_whose_peer_has_its_own_address_does_not_go_round_in_circles(tmp_path: Path) -> None:
    directory = tmp_path / "nodes"
    directory.mkdir(mode=0o700)
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, directory=directory, node_id="b") as node:
        away = directory / "a.json"
        away.write_text(json.dumps({"node": "a", "uri": node.uri}))
        away.chmod(0o600)
        with Client(node.uri, timeout_s=60) as client:
            ref = client.put(b"x", name="x")
            client.release([ref])
            started = time.monotonic()
            with pytest.raises(DataPlaneError):
                client.get(replace(ref, node="a"))
            assert time.monotonic() - started < 30


def test_the_commands_of_the_documentation_are_understood() -> None:
    text = (Path(__file__).parents[3] / "docs" / "dataplane-hosts.md").read_text()
    commands = [line for block in re.findall(r"```serve\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        assert build_parser().parse_args(shlex.split(command)[3:]).node_id in ("a", "b")
