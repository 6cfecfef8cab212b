"""Tests of prefetching: objects are made before a client requests them, after urgent work, once, and without evicting
each other."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.errors import OutOfSpaceError
from dataplane.core.refs import Ref
from dataplane.derive import deriver
from dataplane.derive.prefetch import PrefetchedObjects
from dataplane.derive.priority_queue import PriorityQueue
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.arena import Segment
from dataplane.storage.entries import Slab
from dataplane.storage.store import Store
from tests.dataplane.shards import RECIPE, encode, noise, wait_until, write_shard


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A client of a node of 1 MiB, over a shard of eight images whose patches take 300 KB each, and of one bad one."""
    images = {f"{at}": encode(noise(at, 224, 224)) for at in range(8)} | {"8": b"no image"}
    shard = write_shard(tmp_path / "a.tar", images)
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as node, Client(node.uri) as opened:
        yield opened


def sources(client: Client) -> list[Ref]:
    return [sample.media[0] for sample in client.samples("a", range(8))]


def prefetch(client: Client, indices: range, recipe: dict[str, Any] = RECIPE) -> int:
    return client.prefetch("a", indices, {"image": recipe})


def count(client: Client, *names: str) -> list[int]:
    found = client.stat()
    return [found[name] for name in names]


def hold_up(queue: PriorityQueue) -> tuple[Future[bool], Event]:
    """Keep the one thread of a queue busy until the event is set. Return the work's future, and the event."""
    gate, is_busy = Event(), Event()

    def wait() -> bool:
        is_busy.set()
        return gate.wait(20)

    blocker = queue.submit(wait)
    assert is_busy.wait(20)
    return blocker, gate


def test_what_was_prefetched_is_there_when_it_is_asked_for(client: Client) -> None:
    refs = sources(client)[:3]
    assert prefetch(client, range(3)) == 3
    wait_until(lambda: count(client, "num_prefetched") == [3])
    assert prefetch(client, range(3)) == 3 and count(client, "num_prefetched", "num_prefetch_hits") == [3, 0]
    assert all(isinstance(made, Ref) for made in client.derive(refs, RECIPE))
    client.derive(refs, RECIPE)
    assert count(client, "num_processed", "num_prefetched", "num_prefetch_hits") == [3, 3, 3]


def test_demand_meets_what_is_being_prefetched_and_both_make_it_once(client: Client) -> None:
    refs = sources(client)[:3]
    prefetch(client, range(3))
    client.derive(refs, RECIPE)
    assert count(client, "num_processed", "num_prefetched", "num_prefetch_hits") == [3, 3, 3]


def test_prefetching_stops_before_it_evicts_unused_objects_that_it_made(client: Client) -> None:
    refs = sources(client)
    assert prefetch(client, range(8)) == 8
    wait_until(lambda: count(client, "num_prefetched") == [3] and count(client, "num_prefetch_refused") >= [1], 60)
    (num_refused,) = count(client, "num_prefetch_refused")
    client.derive(refs[:1], RECIPE)  # its hit shows that the first one is still there
    assert count(client, "num_prefetched", "num_prefetch_hits", "num_evicted") == [3, 1, 0]
    assert prefetch(client, range(3, 5)) == 2  # now there is room for one: that of the used one
    wait_until(lambda: count(client, "num_prefetched") == [4], 60)
    wait_until(lambda: count(client, "num_prefetch_refused") > [num_refused], 60)
    client.derive(refs[1:4], RECIPE)
    assert count(client, "num_processed", "num_prefetch_hits", "num_evicted") == [4, 4, 1]
    client.derive(refs[4:], RECIPE)  # demand evicts anything
    assert count(client, "num_processed", "num_recomputed", "num_quarantined") == [8, 0, 0]


def test_an_object_is_asked_for_while_a_place_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    store, is_waiting, gate = Store(Segment(1 << 20, "test")), Event(), Event()
    prefetched, real = PrefetchedObjects(store), store.allocate

    def slow(nbytes: int, deadline: float, scope: str | None = None) -> Slab:
        is_waiting.set()
        assert gate.wait(60)
        return real(nbytes, deadline, scope)

    monkeypatch.setattr(store, "allocate", slow)
    making = threading.Thread(target=prefetched.allocate, args=(700 << 10,), daemon=True)
    making.start()
    assert is_waiting.wait(20)
    asking = threading.Thread(target=prefetched.use, args=("x",), daemon=True)
    asking.start()
    asking.join(20)
    is_free = not asking.is_alive()
    if is_free:  # a second place beside the first finds no room, though nothing is taken yet
        with pytest.raises(OutOfSpaceError, match="prefetched before"):
            prefetched.allocate(700 << 10)
    gate.set()
    making.join(20)
    store.close()
    store.segment.unlink()
    assert is_free


def test_bad_media_are_taken(client: Client) -> None:
    assert prefetch(client, range(8, 9)) == 1
    wait_until(lambda: count(client, "num_quarantined") == [1])
    assert prefetch(client, range(8, 9)) == 1


def test_no_more_is_taken_than_the_window_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deriver, "WINDOW", 2)
    shard = write_shard(tmp_path / "a.tar", {f"{at}": encode(noise(at)) for at in range(4)})
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"a": [str(shard)]}))
    blocker, gate = hold_up(node.services.pool.queue)
    try:
        with Client(node.uri, timeout_s=20) as client:
            assert prefetch(client, range(4)) == 2
            gate.set()
            assert blocker.result(20)
            wait_until(lambda: count(client, "num_prefetched") == [2])
            assert prefetch(client, range(4)) == 4
    finally:
        gate.set()
        node.stop()


def test_what_a_caller_waits_for_goes_first_and_may_overtake() -> None:
    queue, order = PriorityQueue(1), []
    blocker, gate = hold_up(queue)
    ahead = [queue.submit(lambda at=at: order.append(at), is_urgent=False) for at in range(4)]
    urgent = queue.submit(lambda: order.append("urgent"))
    queue.promote(ahead[2])
    assert queue.num_ahead == 3
    gate.set()
    for future in [blocker, urgent, *ahead]:
        future.result(20)
    assert order == ["urgent", 2, 0, 1, 3]
    queue.close()


def test_what_is_called_off_never_runs_and_a_closed_queue_takes_nothing() -> None:
    queue = PriorityQueue(1)
    blocker, gate = hold_up(queue)
    ahead = queue.submit(lambda: 1, is_urgent=False)
    assert queue.cancel_waiting() == {ahead} and ahead.cancelled() and queue.num_ahead == 0
    waiting = queue.submit(lambda: 1)
    queue.close()
    gate.set()
    assert blocker.result(20) and waiting.cancelled() and queue.submit(lambda: 1).cancelled()
    failed = PriorityQueue(1).submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(20)
