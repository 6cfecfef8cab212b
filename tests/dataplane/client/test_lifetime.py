"""Tests that nodes start and end cleanly, however they or their owners end, and that nothing stays in /dev/shm."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, OutOfSpaceError
from dataplane.derive.worker_handle import MAIN_MODULE
from dataplane.storage.arena import reap_dead_segments
from tests.dataplane.server.test_restart import kill
from tests.dataplane.shards import RECIPE, encode, existing, has_ended, noise, segments, wait_until, write_shard

pytestmark = pytest.mark.usefixtures("started_nodes")


def test_stop_ends_the_node_its_workers_and_its_memory(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", {"0": encode(noise(0))})
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as node:
        with Client(node.uri) as client:
            client.derive(client.samples("a", [0])[0].media, RECIPE)
        processes = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        mine = segments(node.pid)
        assert len(processes) == 3 and mine == set(node.segments), "the node, its parser and its decode worker"
    wait_until(lambda: not any(process.is_running() for process in processes))
    assert not existing(mine)
    node.stop()


def test_stop_does_not_wait_for_open_streams() -> None:

    node = EmbeddedNode(memory_bytes=1 << 20, roots={})
    reader = Reader(node.uri)
    node.stop(timeout_s=60)
    assert node._process.poll() == 0, "it was killed"
    reader.close()


OWNER = """
    import sys, time
    from dataplane.client.client import Client
    from dataplane.client.embedded import EmbeddedNode
    node = EmbeddedNode(memory_bytes=1 << 20, roots={"a": [sys.argv[1]]})
    client = Client(node.uri)
    client.derive(client.samples("a", [0])[0].media, eval(sys.argv[2]))
    print(node.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_node_ends_with_its_owner_and_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    shard = write_shard(tmp_path / "a.tar", {"0": encode(noise(0))})
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(shard), repr(dict(RECIPE))]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    node = psutil.Process(int(owner.stdout.readline()))
    processes, mine = [node, *node.children(recursive=True)], segments(node.pid)
    assert len(processes) == 3 and mine
    owner.send_signal(how)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: all(has_ended(process) for process in processes))
    assert not existing(mine)


def test_an_owner_can_start_a_node_from_a_thread_that_ends() -> None:

    nodes: list[EmbeddedNode] = []
    thread = threading.Thread(target=lambda: nodes.append(EmbeddedNode(memory_bytes=1 << 20, roots={})))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with nodes[0] as node, Client(node.uri) as client:
        assert client.stat()["num_objects"] == 0


def test_an_embedded_node_ignores_ctrl_c() -> None:
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as node, Client(node.uri) as client:
        os.kill(node.pid, signal.SIGINT)
        assert client.stat()["num_objects"] == 0
        assert os.getsid(node.pid) == node.pid
        (ignored,) = re.findall(r"^SigIgn:\t(\w+)$", Path(f"/proc/{node.pid}/status").read_text(), re.MULTILINE)
        assert int(ignored, 16) >> (signal.SIGINT - 1) & 1


@pytest.mark.parametrize("is_stopped_by_owner", [True, False])
def test_the_segments_of_a_killed_node_are_removed_by_its_owner_or_by_the_next_node(is_stopped_by_owner: bool) -> None:
    node = EmbeddedNode(memory_bytes=1 << 20, roots={}, restart=False)
    mine = segments(node.pid)
    assert mine
    kill(node)
    if is_stopped_by_owner:
        node.stop()
        assert not existing(mine)
    else:
        with EmbeddedNode(memory_bytes=1 << 20, roots={}):
            wait_until(lambda: not existing(mine))  # a node of another test may be removing them
        node.stop()


def test_the_segments_of_living_nodes_are_not_reaped() -> None:
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as node, Client(node.uri) as client:
        mine = set(node.segments)
        assert not {path.name for path in mine} & set(reap_dead_segments())
        assert existing(mine) == mine
        assert client.put(b"x", name="x").nbytes == 1


def test_a_node_that_cannot_start_says_why() -> None:
    with pytest.raises(OutOfSpaceError, match="--memory"):
        EmbeddedNode(memory_bytes=1 << 50, roots={})
    with pytest.raises(BadRequestError, match="at least 1MiB"):
        EmbeddedNode(memory_bytes=100, roots={})


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", {f"{at}": encode(noise(at)) for at in range(3)})
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as node, Client(node.uri) as client:
        samples = client.samples("a", range(3))
        client.derive(samples[0].media, RECIPE)
        worker = decode_worker(node.pid)
        worker.kill()
        wait_until(lambda: has_ended(worker))
        results = client.derive([sample.media[0] for sample in samples], RECIPE)
        assert [result.name[:2] for result in results] == ["d/"] * 3
        assert client.stat()["num_processed"] == 3
        assert decode_worker(node.pid) != worker


def decode_worker(node_pid: int) -> psutil.Process:
    """Return the one decode worker of a node, which has a parser too."""
    (worker,) = (child for child in psutil.Process(node_pid).children() if MAIN_MODULE in child.cmdline())
    return worker


def test_a_persons_node_stops_on_ctrl_c_with_a_line_that_says_so() -> None:
    command = [sys.executable, "-m", "dataplane", "serve", "--port", "0", "--memory", "1MiB"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    try:
        first = node.stdout.readline()
        assert "serving at grpc://127.0.0.1:" in first and "1 MiB" in first
        uri = first.split("serving at ")[1].split()[0]
        mine = segments(node.pid)
        with Client(uri) as client:
            assert json.dumps(client.stat()) and mine
            node.send_signal(signal.SIGINT)
            assert node.wait(60) == 0
        assert "stopped (SIGINT)" in node.stdout.read()
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
    assert not existing(mine)


PUTTER = """
    import sys, time
    import pyarrow as pa, pyarrow.flight as fl
    batch = pa.record_batch({"data": pa.array(bytes(100_000), pa.uint8())})
    descriptor = fl.FlightDescriptor.for_command(b'{"name": "half", "nbytes": 200000}')
    writer, _ = fl.FlightClient(sys.argv[1]).do_put(descriptor, batch.schema)
    writer.write_batch(batch)
    print("half", flush=True)
    time.sleep(60)
"""


def test_a_put_whose_sender_is_killed_in_mid_stream_leaves_nothing() -> None:
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as node, Client(node.uri) as client:
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PUTTER), node.uri], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None and child.stdout.readline() == b"half\n"
            wait_until(lambda: client.stat()["used_bytes"] > 0)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        wait_until(lambda: client.stat()["used_bytes"] == 0)
        assert client.stat()["num_objects"] == 0
