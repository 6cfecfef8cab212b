"""Tests that a leased view never changes, and that no object is damaged, when a process or the node stands still and
the connection breaks meanwhile."""

import gc
import os
import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.common.proxy import Proxy
from dataplane.cli.main import main
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.lease_session import ResolveStream
from dataplane.client.reader import Reader
from dataplane.core.errors import OutOfSpaceError
from dataplane.core.json_body import dump
from tests.dataplane.client.standing import NBYTES, PUTTER, READER, WRITER, fill, standing, stop, wake
from tests.dataplane.shards import wait_until

MEMORY = 4 << 20
FOUR = str([[0], [1], [2], [3]])


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    """A node that 16 objects fill."""
    with EmbeddedNode(memory_bytes=MEMORY, roots={}) as started:
        yield started


@pytest.fixture
def client(node: EmbeddedNode) -> Iterator[Client]:
    """A client of an empty node."""
    with Client(node.uri, timeout_s=30) as opened:
        wait_until(lambda: opened.stat()["used_bytes"] == 0)
        yield opened


@pytest.fixture
def proxy(node: EmbeddedNode) -> Iterator[Proxy]:
    """The way to the node that a test can break."""
    with Proxy(node.uri) as opened:
        yield opened


def num_streams(client: Client) -> int:
    """Return how many sessions of clients have a connection."""
    return int(client.stat()["streams"].get("session", 0))


def break_off(client: Client, proxy: Proxy, num_left: int) -> None:
    """Break all connections through the proxy, and wait until the node has noticed it."""
    proxy.cut()
    wait_until(lambda: num_streams(client) == num_left)


def test_a_reader_that_stood_still_finds_its_views_as_they_were(
    node: EmbeddedNode, client: Client, proxy: Proxy
) -> None:
    with standing(READER, proxy.uri, node.uri) as process:
        stop(process.pid)
        break_off(client, proxy, 0)
        client.release_names([f"kept/{at}" for at in range(4)])
        refs = fill(client)
        assert len(refs) == 12, "the memory of the views was given to others"
        client.release(refs)
        client.release(fill(client, "again"))
        wake(process.pid)
        process.go_on()
        assert process.line() == FOUR
        assert process.line() == str(b"again")
        client.release_names(["again"])
        wait_until(lambda: client.stat()["used_bytes"] == 0)


@pytest.mark.parametrize("program, result", [(WRITER, "NodeUnavailableError"), (PUTTER, "half")])
def test_a_writer_that_stood_still_writes_into_no_other_object(
    node: EmbeddedNode, client: Client, proxy: Proxy, program: str, result: str
) -> None:
    with standing(program, proxy.uri, node.uri) as process, Reader(node.uri) as reader:
        stop(process.pid)
        break_off(client, proxy, 1)
        refs = fill(client)
        views = reader.resolve(refs)
        assert len(refs) == 12, "the memory of the unsealed array was given to others"
        wake(process.pid)
        process.go_on()
        assert process.line() == result
        assert all((view == 255).all() for view in views)
        del views
        client.release(refs)
        client.release_names(["half"])
        wait_until(lambda: client.stat()["used_bytes"] == 0)


def test_a_client_that_stands_still_is_named_and_its_death_frees_its_memory(
    node: EmbeddedNode, client: Client, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, kind in ((READER, "reader"), (WRITER, "writer")):
        with standing(program, proxy.uri, node.uri) as process:
            stop(process.pid)
            break_off(client, proxy, 0)
            wait_until(lambda: client.stat()["num_standing_still"] == 1)
            (found,) = client.stat()["standing_still"]
            assert (found["kind"], found["pid"], found["held_bytes"]) == (kind, process.pid, 4 * NBYTES)
            assert 10 <= found["still_s"] < 60 and client.stat()["still_bytes"] == 4 * NBYTES
            for command in (["stat"], ["top", "--once"]):
                assert main([*command, "--uri", node.uri]) == 0
                shown = capsys.readouterr().out
                assert re.search(rf"{kind} .* {process.pid} .* \d\d s .* 1 MiB", shown), shown
            with Client(node.uri, timeout_s=1) as wanting, pytest.raises(OutOfSpaceError) as failed:
                wanting.put(bytes(MEMORY), name="all")
            told = rf"while they stand still: the {kind} {process.pid} \(1 MiB, for \d\d s\); let these processes go on"
            assert re.search(told, str(failed.value)), failed.value
            os.kill(process.pid, signal.SIGKILL)
            client.release_names([f"kept/{at}" for at in range(4)])
            wait_until(lambda: client.stat()["used_bytes"] == 0)
            assert client.stat()["num_standing_still"] == client.stat()["num_leases"] == 0


def test_views_live_on_over_a_node_that_stood_still(client: Client) -> None:
    with EmbeddedNode(memory_bytes=MEMORY, roots={}) as other, Proxy(other.uri) as way:
        with Client(other.uri) as direct, Reader(way.uri, timeout_s=60) as reader:
            refs = [direct.put(bytes([at]) * NBYTES, name=f"{at}") for at in range(4)]
            views = reader.resolve(refs)
            stop(other.pid)
            way.cut()
            wake(other.pid)
            wait_until(lambda: num_streams(direct) == 1)
            direct.release(refs)
            assert len(fill(direct)) == 12
            assert [set(view.tolist()) for view in views] == [{0}, {1}, {2}, {3}]
            del views
            gc.collect()
            wait_until(lambda: direct.stat()["num_leases"] == 0)


def test_one_broken_stream_ends_no_lease(node: EmbeddedNode, client: Client, proxy: Proxy) -> None:
    with Reader(proxy.uri, timeout_s=60) as reader:
        ref = client.put(b"x" * NBYTES, name="x")
        view = reader.resolve([ref])[0]
        session = reader._current.last
        for _ in range(3):
            proxy.cut()
            assert reader.resolve([ref])[0].tobytes() == view.tobytes()
        assert reader._current.last is session and reader.mapping() is not None
        gc.collect()
        wait_until(lambda: client.stat()["num_leases"] == 1)
        client.release([ref])
        del view
        wait_until(lambda: client.stat()["used_bytes"] == 0)


@pytest.mark.parametrize("is_told_first", [True, False])
def test_the_leases_of_a_reply_that_did_not_arrive_end(node: EmbeddedNode, client: Client, is_told_first: bool) -> None:
    client.put(b"x", name="x")
    with Reader(node.uri) as reader:
        assert reader._current.last is not None
        session = reader._current.last
        stream = ResolveStream(session)
        stream._writer.write_metadata(dump({"names": ["x"]}))
        wait_until(lambda: client.stat()["num_leases"] == 1)
        if is_told_first:
            session.node.drop_stream(stream._number, 0)
            wait_until(lambda: not session.node._unheard)
        stream._reader.cancel()
        if not is_told_first:
            wait_until(lambda: not client.stat()["streams"].get("resolve"))
            time.sleep(0.2)
            assert client.stat()["num_leases"] == 1, "perhaps the reply arrived"
            session.node.drop_stream(stream._number, 0)
        wait_until(lambda: client.stat()["num_leases"] == 0)
    client.release_names(["x"])


def test_arrays_of_a_block_that_failed_are_read_only(node: EmbeddedNode, client: Client) -> None:
    from dataplane.client.writer import Writer

    with Writer(node.uri) as writer:
        with pytest.raises(RuntimeError), writer.create("w", "uint8", (8,)) as place:
            raise RuntimeError
        with pytest.raises(ValueError, match="read-only"):
            place.array[:] = np.uint8(1)
