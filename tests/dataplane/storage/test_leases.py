"""Tests that a lease lasts as long as an array over the object exists, and not longer."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from dataplane.client import embedded
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.client.torch_view import as_tensor
from dataplane.core.errors import ChecksumError, NodeUnavailableError
from tests.dataplane.shards import wait_until

WITH_TORCH = [pytest.param(make, marks=pytest.mark.torch) for make in ("tensor", "tensor slice")]


def num_leases(client: Client) -> int:
    gc.collect()
    return int(client.stat()["num_leases"])


def test_views_are_read_only_aligned_and_cannot_be_made_writable(client: Client, reader: Reader) -> None:
    ref = client.put(bytes(range(200)), name="view")
    view = reader.resolve([ref])[0]
    assert not view.flags.writeable
    assert view.__array_interface__["data"][0] % 64 == 0
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    with pytest.raises(ValueError, match="WRITEABLE"):
        view[3:].flags.writeable = True
    client.release([ref])


@pytest.mark.parametrize("make", ["slice", "reshape", *WITH_TORCH, "arrow"])
def test_whatever_is_made_over_a_view_keeps_its_lease(client: Client, reader: Reader, make: str) -> None:
    import pyarrow as pa

    if "tensor" in make:
        pytest.importorskip("torch")

    ref = client.put(np.arange(1000, dtype=np.int32), name=f"keep/{make}", dtype="int32")
    view = reader.resolve([ref])[0]
    makers: dict[str, Callable[[np.ndarray], object]] = {
        "slice": lambda array: array[10:20][2:4],
        "reshape": lambda array: array.reshape(10, 100).T,
        "tensor": as_tensor,
        "tensor slice": lambda array: as_tensor(array).view(10, 100)[3, 5:7],
        "arrow": pa.py_buffer,
    }
    made = makers[make](view)
    assert "tensor" not in make or str(made.dtype) == "torch.int32"  # type: ignore[attr-defined]
    del view
    gc.collect()
    wait_until(lambda: num_leases(client) == 1)
    client.release([ref])
    used = client.stat()["used_bytes"]
    del made
    wait_until(lambda: num_leases(client) == 0)
    assert client.stat()["used_bytes"] < used


@pytest.mark.torch
def test_a_tensor_is_a_view_without_a_warning(client: Client, reader: Reader, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    ref = client.put(array, name="tensor", dtype="float32", shape=(2, 3))
    view = reader.resolve([ref])[0]
    tensor = as_tensor(view)
    assert tensor.data_ptr() == view.__array_interface__["data"][0]
    assert tensor.tolist() == array.tolist() and tuple(tensor.shape) == (2, 3)
    assert as_tensor(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]
    client.release([ref])


def test_one_ref_twice_in_a_batch_gets_two_leases(client: Client, reader: Reader) -> None:
    ref = client.put(b"twice", name="twice")
    one, two = reader.resolve([ref, ref])
    wait_until(lambda: num_leases(client) == 2)
    del one
    wait_until(lambda: num_leases(client) == 1)
    assert two.tobytes() == b"twice"
    client.release([ref])


def test_a_failed_resolve_leaves_no_lease(client: Client, reader: Reader) -> None:
    there = client.put(b"there", name="there")
    gone = client.put(b"gone", name="gone")
    client.release([gone])
    with pytest.raises(LookupError, match="gone"):
        reader.resolve([there, gone, there])
    wait_until(lambda: num_leases(client) == 0)
    assert reader.resolve([there])[0].tobytes() == b"there"


def test_a_closed_reader_keeps_the_leases_of_living_views(node: EmbeddedNode, client: Client) -> None:
    ref = client.put(b"alive", name="alive")
    reader = Reader(node.uri)
    view = reader.resolve([ref])[0]
    reader.close()
    client.release([ref])
    time.sleep(0.1)
    assert num_leases(client) == 1 and view.tobytes() == b"alive"
    with pytest.raises(NodeUnavailableError, match="is closed"):
        reader.resolve([ref])
    del view
    wait_until(lambda: client.stat()["num_readers"] == 0)


def test_a_node_knows_of_the_views_that_were_dropped_when_a_reader_has_closed(
    node: EmbeddedNode, client: Client
) -> None:
    for _ in range(20):
        with Reader(node.uri) as reader:
            views = reader.resolve([client.put(b"dropped", name="dropped"), client.put(b"kept", name="kept")])
            kept = views.pop()
            del views
        assert client.stat()["num_leases"] == 1
        del kept
        wait_until(lambda: client.stat()["num_leases"] == 0)


def test_a_reader_that_is_forgotten_ends_its_session(node: EmbeddedNode, client: Client) -> None:
    reader = Reader(node.uri)
    assert client.stat()["num_readers"] == 1
    del reader
    wait_until(lambda: client.stat()["num_readers"] == 0)


CHILD = """
    import sys, time
    from dataplane.client.client import Client
    from dataplane.client.reader import Reader
    reader = Reader(sys.argv[1])
    client = Client(sys.argv[1])
    views = reader.resolve([client.put(bytes(1000), name=f"child/{at}") for at in range(5)])
    print("ready", flush=True)
    time.sleep(60)
"""


def test_leases_end_when_the_reading_process_is_killed(node: EmbeddedNode, client: Client) -> None:
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), node.uri], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert num_leases(client) == 5
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: num_leases(client) == 0)
    wait_until(lambda: client.stat()["num_readers"] == 0)


WRITER = """
    import sys, time
    import pyarrow as pa, pyarrow.flight as fl
    writer, reader = fl.FlightClient(sys.argv[1]).do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "put"}'))
    reader.read_chunk()
    writer.write_metadata(pa.py_buffer(b'{"allocate": 1000000}'))
    print(reader.read_chunk().app_metadata.to_pybytes(), flush=True)
    time.sleep(60)
"""


def test_a_place_that_was_never_sealed_goes_back_when_its_writer_is_killed(node: EmbeddedNode, client: Client) -> None:
    used = client.stat()["used_bytes"]
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), node.uri], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and b"offset" in child.stdout.readline()
        assert client.stat()["used_bytes"] >= used + 1_000_000
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: client.stat()["used_bytes"] == used)


def test_a_view_outlives_its_node() -> None:
    node = EmbeddedNode(memory_bytes=1 << 20, roots={})
    client, reader = Client(node.uri), Reader(node.uri)
    ref = client.put(b"still here", name="x")
    view = reader.resolve([ref])[0]
    node.stop()
    assert view.tobytes() == b"still here"
    reader.timeout_s = 3
    with socket.socket() as held:  # so that no other test's node gets the port meanwhile
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", int(node.uri.rpartition(":")[2])))
        with pytest.raises(NodeUnavailableError):
            reader.resolve([ref])
    del view
    reader.close()
    client.close()


def answers(client: Client) -> bool:
    with contextlib.suppress(TimeoutError):
        return bool(client.stat())
    return False


def is_stopped(node: psutil.Process) -> bool:
    """Return True if each thread of the node stands still. A thread may end between being listed and being looked
    at."""
    states = []
    for thread in node.threads():
        with contextlib.suppress(psutil.NoSuchProcess):
            states.append(psutil.Process(thread.id).status())
    return set(states) == {psutil.STATUS_STOPPED}


def test_a_node_that_hangs_costs_a_reader_no_more_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lease_session", "session_stream", "inplace_stream"):
        monkeypatch.setattr(f"dataplane.client.{module}.GRACE_S", 0.1)
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as node:
        patient, client, reader = Client(node.uri), Client(node.uri, timeout_s=0.5), Reader(node.uri)
        ref = patient.put(b"x", name="x")
        held = reader.resolve([ref])
        wait_until(lambda: answers(client))
        reader.timeout_s = 0.5
        process = psutil.Process(node.pid)
        os.kill(node.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(process))
            started = time.monotonic()
            with pytest.raises(TimeoutError, match=r"resolve in 0\.5 s"):
                reader.resolve([ref])
            with pytest.raises(TimeoutError, match=r"stat in 0\.5 s"):
                client.stat()
            with pytest.raises(TimeoutError, match=r"put in 0\.5 s"):
                client.put(bytes(300_000), name="big")
            assert time.monotonic() - started < 30
        finally:
            os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: num_leases(patient) == 1)
        reader.timeout_s = 60.0
        assert reader.resolve([ref])[0].tobytes() == held[0].tobytes()
        del held
        reader.close()


def test_a_reader_that_is_closed_in_the_middle_of_a_resolve_keeps_the_leases(
    node: EmbeddedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = client.put(b"late", name="late")
    reader = Reader(node.uri)
    real = reader._views

    def closed_meanwhile(*args: Any) -> Any:
        reader.close()
        reader._current.last.node._thread.join(1.2)
        return real(*args)

    monkeypatch.setattr(reader, "_views", closed_meanwhile)
    view = reader.resolve([ref])[0]
    client.release([ref])
    assert num_leases(client) == 1 and view.tobytes() == b"late"
    monkeypatch.undo()
    del view
    wait_until(lambda: client.stat()["num_readers"] == 0)


def test_a_stale_or_forged_ref_is_refused_and_leaves_no_lease(client: Client, reader: Reader) -> None:
    other = client.put(b"other", name="other")
    stale = client.put(np.zeros((2, 2), np.float32), name="again", dtype="float32", shape=(2, 2))
    client.release([stale])
    fresh = client.put(np.arange(4, dtype=np.int32), name="again", dtype="int32")
    edits: list[dict[str, Any]] = [{"shape": (1,) * 100}, {"dtype": "object"}, {"shape": (5,), "nbytes": 20}]
    for ref in (stale, *(replace(fresh, **edit) for edit in edits)):
        with pytest.raises(
            ChecksumError, match=r"again is int32 \[4\] of 16 bytes|again was released and written again"
        ):
            reader.resolve([other, ref])
        wait_until(lambda: client.stat()["num_leases"] == 0)
    assert len(reader._idle) == 1
    assert reader.resolve([fresh])[0].tolist() == [0, 1, 2, 3]
    client.release([other, fresh])


def test_a_reader_goes_on_with_a_node_that_was_started_again_by_hand() -> None:
    reservation = embedded._reserve("127.0.0.1", 0)  # keeps others from the port between the lives of the node
    port = reservation.getsockname()[1]
    command = [sys.executable, "-m", "dataplane", "serve", "--port", str(port), "--memory", "1MiB"]
    nodes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert b"serving" in nodes[-1].stdout.readline()  # type: ignore[union-attr]

    try:
        start()
        client, reader = (
            Client(f"grpc://127.0.0.1:{port}", timeout_s=60),
            Reader(f"grpc://127.0.0.1:{port}", timeout_s=60),
        )
        view = reader.resolve([client.put(b"x", name="x")])[0]
        nodes[0].terminate()
        nodes[0].wait(60)
        start()
        ref = client.put(b"y", name="y")
        assert reader.resolve([ref])[0].tobytes() == b"y"
        assert view.tobytes() == b"x"
        del view
        reader.close()
        client.close()
    finally:
        reservation.close()
        for node in nodes:
            node.kill()
            node.wait()
            node.stdout.close()  # type: ignore[union-attr]
