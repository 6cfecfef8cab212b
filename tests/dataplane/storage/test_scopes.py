"""Tests that the objects of a scope end together, stay while it is open, respect its quota, and do not outlive their
client."""

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, MissingObjectError, OutOfSpaceError
from dataplane.core.refs import Ref
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.server.test_restart import kill
from tests.dataplane.shards import RECIPE, wait_until

BLOCK = 64 * 1024


@pytest.fixture
def small_node() -> Iterator[Node]:
    """A node of 1 MiB in this process, whose clients have half a second to come back."""
    node = Node(NodeConfig(memory_bytes=1 << 20, scope_grace_s=0.5))
    yield node
    node.stop()


@pytest.fixture
def small(small_node: Node) -> Iterator[Client]:
    with Client(small_node.uri, timeout_s=20) as client:
        yield client


@pytest.mark.parametrize("nbytes", [1000, PUT_IN_PLACE_FROM])
def test_plain_objects_end_with_the_last_of_their_scopes(small: Client, nbytes: int) -> None:
    small.open_scope("one")
    small.open_scope("two")
    both = small.put(bytes(nbytes), name="both", scope="one")
    small.put(b"alone", name="alone", scope="one")
    assert small.put(bytes(nbytes), name="both", scope="two") == both
    assert small.close_scope("one") == {"num_dropped": 1, "dropped_bytes": 5}
    assert small.get("both") == bytes(nbytes) and small.stat()["num_objects"] == 1
    with pytest.raises(MissingObjectError, match="'one' is not open"):
        small.put(b"late", name="late", scope="one")
    assert small.close_scope("two") == {"num_dropped": 1, "dropped_bytes": nbytes}
    wait_until(lambda: small.stat()["num_leases"] == 0)  # the get's, once gRPC has sent it
    stat = small.stat()
    assert (stat["num_objects"], stat["used_bytes"], stat["scoped_bytes"], stat["num_scopes"]) == (0, 0, 0, 0)


def test_a_view_outlives_the_scope_of_its_object(small_node: Node, small: Client) -> None:
    small.open_scope("step")
    ref = small.put(bytes(range(256)) * 16, name="seen", scope="step")
    with Reader(small_node.uri) as reader:
        view = reader.resolve([ref])[0]
        assert small.close_scope("step")["num_dropped"] == 1
        assert small.stat()["used_bytes"] > 0 and view.tobytes() == bytes(range(256)) * 16
        with pytest.raises(MissingObjectError):
            reader.resolve([ref])
        del view
        wait_until(lambda: small.stat()["used_bytes"] == 0)


def test_a_put_over_the_quota_waits_and_then_fails_with_the_numbers(small: Client) -> None:
    small.open_scope("narrow", quota_bytes=4 * BLOCK)
    first = small.put(bytes(3 * BLOCK), name="first", scope="narrow")
    small.timeout_s = 2
    with pytest.raises(
        OutOfSpaceError, match=rf"wanted_bytes={2 * BLOCK} used_bytes={3 * BLOCK} quota_bytes={4 * BLOCK}"
    ):
        small.put(bytes(2 * BLOCK), name="second", scope="narrow")
    small.timeout_s = 20
    with pytest.raises(OutOfSpaceError, match="quota"):
        small.put(bytes(5 * BLOCK), name="third", scope="narrow")
    threading.Timer(0.2, small.release, [[first]]).start()
    small.put(bytes(2 * BLOCK), name="second", scope="narrow")
    with pytest.raises(BadRequestError, match="is open with quota_bytes"):
        small.open_scope("narrow", quota_bytes=BLOCK)
    small.open_scope("narrow", quota_bytes=4 * BLOCK)
    assert small.close_scope("narrow")["num_dropped"] == 1


def test_derived_objects_of_an_open_scope_are_not_evicted(node: EmbeddedNode, client: Client) -> None:
    client.open_scope("epoch")
    source = client.samples("good", [0])[0].media[0] if client.ingest("good").num_samples else None
    assert source is not None
    made = client.derive([source], RECIPE, scope="epoch")[0]
    assert isinstance(made, Ref)
    assert client.stat()["scoped_bytes"] >= made.nbytes
    everything = bytes(client.stat()["budget_bytes"])
    with Client(node.uri, timeout_s=2) as hurried, pytest.raises(OutOfSpaceError):
        hurried.put(everything, name="flood")
    assert client.get(made.name) and client.stat()["num_recomputed"] == 0
    assert client.close_scope("epoch") == {"num_dropped": 0, "dropped_bytes": 0}
    assert client.stat()["scoped_bytes"] == 0
    client.release([client.put(everything, name="flood")])
    with pytest.raises(MissingObjectError):
        client.get(made.name)


CLIENT = """
    import sys, time
    from dataplane.client.client import Client
    client = Client(sys.argv[1])
    client.open_scope("bound")
    client.put(b"x" * 1000, name="bound/x", scope="bound")
    client.put(b"x" * 1000, name="free/x")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_scopes_of_a_killed_client_close_after_its_grace_and_its_other_objects_stay(
    small_node: Node, small: Client
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), small_node.uri]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert small.stat()["num_scopes"] == 1
    finally:
        killed = time.monotonic()
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: small.stat()["num_scopes"] == 0)
    assert time.monotonic() - killed >= 0.4
    assert small.get("free/x") == b"x" * 1000
    with pytest.raises(MissingObjectError):
        small.get("bound/x")


def test_a_client_that_closes_takes_its_scopes_along_at_once(small_node: Node, small: Client) -> None:
    with Client(small_node.uri) as other:
        other.open_scope("other")
        other.put(b"y", name="y", scope="other")
        small_node.services.scope_owners.grace_s = 60
    wait_until(lambda: small.stat()["num_scopes"] == 0)
    assert small.stat()["used_bytes"] == 0


def test_a_scope_survives_a_connection_that_breaks_and_comes_back(small_node: Node, small: Client) -> None:
    small_node.services.scope_owners.grace_s = 5
    small.open_scope("steady")
    stream = small._heartbeat._stream
    assert stream is not None
    stream[1].cancel()
    wait_until(lambda: small._heartbeat._stream is not stream)
    small.put(b"z", name="z", scope="steady")
    assert small.stat()["num_scopes"] == 1 and not small_node.services.scope_owners._timers


def keepers() -> set[threading.Thread]:
    """Return the threads that tell a node that a client of this process is there."""
    return {thread for thread in threading.enumerate() if thread.name == "scopes"}


def test_clients_that_close_with_an_open_scope_end_it_and_their_thread() -> None:
    """Test that neither side waits for the other, and that gRPC does not abort this process, as it does if two threads
    end one stream."""
    before = keepers()
    node = Node(NodeConfig(memory_bytes=1 << 20, scope_grace_s=3600))
    with contextlib.ExitStack() as stack:
        stack.callback(node.stop)
        watcher = stack.enter_context(Client(node.uri, timeout_s=20))
        for number in range(40):
            with Client(node.uri, timeout_s=20) as client:
                client.open_scope(f"closing/{number}")
                client.put(b"x", name=f"closing/{number}/x", scope=f"closing/{number}")
                assert keepers() > before
            assert keepers() == before
        wait_until(lambda: watcher.stat()["num_scopes"] == 0)
        with pytest.raises(MissingObjectError, match="closing/7/x"):
            watcher.get("closing/7/x")


def test_a_client_dropped_while_its_node_is_away_leaves_no_thread() -> None:
    gc.collect()
    before = keepers()
    with EmbeddedNode(memory_bytes=1 << 20, roots={}, restart=False) as node:
        client = Client(node.uri, timeout_s=5)
        client.open_scope("left behind")
        (ours,) = keepers() - before
        kill(node)
        is_there = client._heartbeat._is_there
        wait_until(lambda: not is_there.is_set())
        del client
        gc.collect()
        wait_until(lambda: ours not in keepers())


def test_a_scope_that_another_client_opened_meanwhile_does_not_keep_the_others_away(
    small_node: Node, small: Client
) -> None:
    small_node.services.scope_owners.grace_s = 60
    small.open_scope("taken")
    small.open_scope("ours")
    stream = small._heartbeat._stream
    assert stream is not None
    with Client(small_node.uri) as other:
        other.close_scope("taken")
        other.open_scope("taken", quota_bytes=BLOCK)
        stream[1].cancel()
        wait_until(lambda: small._heartbeat._stream is not stream)
        small.put(b"z", name="z", scope="ours")
        other.close_scope("taken")


def test_calls_that_name_a_scope_wait_for_it_after_a_restart_and_a_close_may_come_twice(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.scope_heartbeat._RETRY_S", 2.0)
    with Client(node.uri, timeout_s=120) as client:
        source = client.samples("good", [0])[0].media[0]
        client.open_scope("again")
        kill(node)
        assert isinstance(client.derive([source], RECIPE, scope="again")[0], Ref)
        client.open_scope("other")
        kill(node)
        client.put(b"x", name="x", scope="other")
        kill(node)
        assert client.close_scope("other") == {"num_dropped": 0, "dropped_bytes": 0}
        with pytest.raises(MissingObjectError, match="'other' is not open"):
            client.close_scope("other")
