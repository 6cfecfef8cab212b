"""Tests that a node which dies and restarts costs only time: clients and readers continue, and nothing is left over."""

import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
import pytest

from dataplane.client import embedded
from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import MissingObjectError, NodeUnavailableError
from dataplane.core.refs import Ref
from tests.dataplane.shards import RECIPE, has_ended, wait_until


@pytest.fixture
def node(shard_dir: Path) -> Iterator[EmbeddedNode]:
    """A node of 4 MiB for one test, with the dataset `good`."""
    with EmbeddedNode(memory_bytes=4 << 20, roots={"good": [f"{shard_dir}/good-*.tar"]}) as started:
        yield started


def kill(node: EmbeddedNode) -> None:
    """Kill the node and wait until it is gone. The next call finds no node, or its next incarnation."""
    process = psutil.Process(node.pid)
    process.kill()
    wait_until(lambda: has_ended(process))


def derive_all(client: Client) -> list[Ref]:
    made = client.derive([sample.media[0] for sample in client.samples("good", range(8))], RECIPE)
    return [ref for ref in made if isinstance(ref, Ref)]


@pytest.mark.usefixtures("started_nodes")
def test_a_client_and_a_reader_go_on_after_the_node_was_killed(node: EmbeddedNode) -> None:
    with Client(node.uri, timeout_s=120) as client, Reader(node.uri, timeout_s=120) as reader:
        refs = derive_all(client)
        plain = client.put(b"gone with the node", name="plain")
        views = reader.resolve([*refs, plain])
        before = [view.copy() for view in views]
        kill(node)
        again = reader.resolve(refs)
        assert all(np.array_equal(old, new) for old, new in zip(before, again, strict=False))
        assert all(np.array_equal(old, view) for old, view in zip(before, views, strict=True))
        with pytest.raises(MissingObjectError, match="plain"):
            reader.resolve([plain])
        assert derive_all(client)[0].name == refs[0].name
        wait_until(lambda: node.num_restarts == 1)  # counted a moment after the first answer
        del views, again
        gc.collect()
        wait_until(lambda: client.stat()["num_leases"] == 0)


@pytest.mark.parametrize("nbytes", [10, PUT_IN_PLACE_FROM])
def test_every_verb_of_a_client_is_sent_again(node: EmbeddedNode, nbytes: int) -> None:
    with Client(node.uri, timeout_s=120) as client:
        source = client.samples("good", [0])[0].media[0]
        client.put(bytes(nbytes), name="first")
        calls = (
            lambda: client.put(bytes(nbytes), name="again").nbytes == nbytes,
            lambda: client.release_names(["first"]) == 0,
            lambda: client.ingest("good").num_samples == 16,
            lambda: len(client.samples("good", [1])) == 1,
            lambda: client.get(source) != b"",
        )
        for number, call in enumerate(calls):
            kill(node)
            assert call()
            wait_until(lambda number=number: node.num_restarts == number + 1)  # type: ignore[misc]
            node._restarts.clear()  # this test has a reason to kill it more often than the bounds allow


def test_a_node_that_was_never_reached_is_an_error_at_once() -> None:
    started = time.monotonic()
    with Client("grpc://127.0.0.1:1", timeout_s=30) as client, pytest.raises(NodeUnavailableError, match="running"):
        client.stat()
    with pytest.raises(NodeUnavailableError, match="running"):
        Reader("grpc://127.0.0.1:1", timeout_s=30)
    assert time.monotonic() - started < 20


def test_a_node_that_stays_away_is_given_up_at_the_deadline_with_what_was_tried(shard_dir: Path) -> None:
    node = EmbeddedNode(memory_bytes=1 << 20, roots={}, restart=False)
    with Client(node.uri) as client, Reader(node.uri) as reader:
        ref = client.put(b"x", name="x")
        view = reader.resolve([ref])[0]
        kill(node)
        client.timeout_s = reader.timeout_s = 1.5
        for attempt in (client.stat, lambda: reader.resolve([ref]), lambda: client.put(b"y", name="y")):
            started = time.monotonic()
            with pytest.raises(NodeUnavailableError, match=r"tried \d+ time\(s\) in \d+\.\d s of timeout_s=1\.5"):
                attempt()
            assert 0.9 < time.monotonic() - started < 30
        assert view.tobytes() == b"x"
    node.stop()


def test_many_threads_go_on_with_one_new_session(node: EmbeddedNode) -> None:
    wrong: list[object] = []
    stop = threading.Event()

    with Client(node.uri, timeout_s=120) as client, Reader(node.uri, timeout_s=120) as reader:
        refs = derive_all(client)
        wanted = [view.tobytes() for view in reader.resolve(refs)]

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                at = int(rng.integers(len(refs)))
                try:
                    if reader.resolve([refs[at]])[0].tobytes() != wanted[at]:
                        wrong.append(at)
                    client.put(rng.bytes(100), name=f"{seed}/{rng.integers(2**60)}")
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for number in range(3):
            kill(node)
            wait_until(lambda number=number: node.num_restarts == number + 1)  # type: ignore[misc]
            reader.resolve(refs)
        stop.set()
        for thread in threads:
            thread.join(150)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        wait_until(lambda: client.stat()["num_readers"] == 1)


@pytest.mark.usefixtures("started_nodes")
def test_restarts_leave_no_thread_no_file_and_no_mapping(node: EmbeddedNode) -> None:
    process = psutil.Process()

    def used() -> tuple[int, int, int]:
        gc.collect()
        maps = sum("/dev/shm/dataplane-" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return threading.active_count(), process.num_fds(), maps

    with Client(node.uri, timeout_s=120) as client, Reader(node.uri, timeout_s=120) as reader:
        refs = derive_all(client)

        def turn(number: int) -> None:
            client.put(bytes(PUT_IN_PLACE_FROM), name=f"turn/{number}")
            views = reader.resolve(refs)
            kill(node)
            assert len(reader.resolve(refs)) == len(views)
            node._restarts.clear()

        turn(0)
        before = used()
        for number in range(1, 6):
            turn(number)
        wait_until(lambda: used()[0] <= before[0] and used()[1] <= before[1] + 3 and used()[2] <= before[2])


def test_a_reader_made_before_a_fork_says_so_also_when_the_node_restarted(node: EmbeddedNode) -> None:
    with Client(node.uri) as client, Reader(node.uri) as reader:
        ref = client.put(b"x", name="x")
        kill(node)
        child = os.fork()
        if child == 0:
            try:
                reader.resolve([ref])
            except NodeUnavailableError as error:
                os._exit(0 if "after the fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("started_nodes")
def test_a_node_comes_back_on_its_port_and_only_its_own_segments_go(node: EmbeddedNode) -> None:
    segments, uri = node.segments, node.uri
    assert all(path.exists() for path in segments)
    kill(node)
    wait_until(lambda: node.num_restarts == 1)
    assert node.uri == uri and node.segments != segments
    assert not any(path.exists() for path in segments) and all(path.exists() for path in node.segments)
    with Client(uri) as client:
        assert client.stat()["num_objects"] == 0


def test_a_node_that_dies_too_often_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "MAX_RESTARTS", 2)
    told: list[NodeUnavailableError] = []
    with caplog.at_level(logging.WARNING), EmbeddedNode(memory_bytes=1 << 20, roots={}, on_failure=told.append) as node:
        for number in range(2):
            kill(node)
            wait_until(lambda number=number: node.num_restarts == number + 1)  # type: ignore[misc]
        assert node.failure is None
        kill(node)
        wait_until(lambda: bool(told))
        assert told == [node.failure] and "SIGKILL" in str(node.failure) and "2 restarts" in str(node.failure)
        assert not any(path.exists() for path in node.segments)
    assert "is started again" in caplog.text and "(restart 2)" in caplog.text


@pytest.mark.parametrize("error", [OSError("too many open files"), ValueError("Expecting value: line 1 column 1")])
def test_a_node_that_cannot_be_started_again_is_given_up_whatever_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*args: object) -> None:
        raise error

    monkeypatch.setattr(embedded, "MAX_RESTARTS", 2)
    told: list[NodeUnavailableError] = []
    with EmbeddedNode(memory_bytes=1 << 20, roots={}, on_failure=told.append) as node:
        monkeypatch.setattr(embedded, "NodeProcess", refused)
        kill(node)
        wait_until(lambda: bool(told))
        assert told == [node.failure] and "after 2 restarts" in str(node.failure)


class Starts:
    """Counts the starts of nodes, and makes those that are not the `num_bad + 1`-th ask for too much memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bad: int) -> None:
        self.at: list[float] = []
        real = embedded.NodeProcess

        def start(command: list[str], *args: Any) -> Any:
            self.at.append(time.monotonic())
            return real([*command, "--memory", "1000TiB"] if len(self.at) <= num_bad else command, *args)

        monkeypatch.setattr(embedded, "NodeProcess", start)


def test_restarts_without_room_wait_longer_each_time_and_the_last_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "MAX_RESTARTS", 3)
    monkeypatch.setattr(embedded, "_FIRST_PAUSE_S", 0.5)
    told: list[NodeUnavailableError] = []
    with EmbeddedNode(memory_bytes=1 << 20, roots={}, on_failure=told.append) as node:
        starts = Starts(monkeypatch, 100)
        kill(node)
        wait_until(lambda: bool(told))
        waits = [later - at for at, later in itertools.pairwise([*starts.at, time.monotonic()])]
        assert len(waits) == 3 and waits[0] > 0.5 and waits[1] > 1 and waits[2] > 2
        assert "the last start failed: /dev/shm has" in str(node.failure)
        assert "taken until all views of it are dropped" in str(node.failure)


def test_a_node_that_has_room_again_after_a_while_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_FIRST_PAUSE_S", 0.1)
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as node, Client(node.uri, timeout_s=60) as client:
        client.stat()  # a client waits only for a node that it has reached
        Starts(monkeypatch, 3)
        kill(node)
        assert client.stat()["num_objects"] == 0
        wait_until(lambda: node.num_restarts == 1)
        assert node.failure is None and node._troubles == []


def test_the_end_of_a_node_is_told_whatever_ended_it() -> None:
    assert [embedded._ending(code) for code in (3, -9, -40)] == ["exit code 3", "signal SIGKILL", "signal 40"]


@pytest.mark.usefixtures("started_nodes")
def test_stop_in_the_middle_of_a_restart_ends_the_new_node(shard_dir: Path) -> None:
    for _ in range(3):
        node = EmbeddedNode(memory_bytes=1 << 20, roots={})
        first = node.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda node=node, first=first: node.pid != first)  # type: ignore[misc]
        second = psutil.Process(node.pid)
        node.stop()
        assert has_ended(second)
        assert second.pid not in [child.pid for child in psutil.Process().children()]
        assert not any(path.exists() for path in node.segments)


def test_the_first_durable_puts_into_a_scope_may_come_together_and_outlive_the_node(tmp_path: Path) -> None:
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, spill_dir=tmp_path) as node, Client(node.uri) as client:
        for turn in range(5):
            client.open_scope(f"scope {turn}")
            with ThreadPoolExecutor(8) as threads:
                puts = [
                    threads.submit(client.put, bytes([at]), name=f"{turn}/{at}", scope=f"scope {turn}", durable=True)
                    for at in range(16)
                ]
            assert [client.get(put.result()) for put in puts] == [bytes([at]) for at in range(16)]
        kill(node)
        assert [client.get(f"4/{at}") for at in range(16)] == [bytes([at]) for at in range(16)]


class AlwaysTaken(SimpleQueue[int | None]):
    """A queue that seems to have items; but whenever one is asked for, another reader has just taken it."""

    def empty(self) -> bool:
        return False


def test_asking_for_views_never_waits_for_a_lease_that_the_sessions_thread_took(node: EmbeddedNode) -> None:
    with Reader(node.uri) as reader:
        assert reader._current.last is not None
        session, found = reader._current.last.node, []
        own, session.ended = session.ended, AlwaysTaken()
        asking = threading.Thread(target=lambda: found.append(session.has_views), daemon=True)
        asking.start()
        asking.join(20)
        session.ended.put(None)  # ends one that waits all the same
        session.ended = own
        assert found == [False]
