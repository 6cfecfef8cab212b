"""Tests of put, get, stat and release on a real node, over Flight and in place."""

import contextlib
import gc
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, MissingObjectError, NodeUnavailableError, OutOfSpaceError
from tests.dataplane.shards import encode, noise, wait_until

SIZES = [0, 1, 63, 65, 64 * 1024, PUT_IN_PLACE_FROM - 1, PUT_IN_PLACE_FROM, (5 << 20) + 3]


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_put_comes_back_by_get_and_by_resolve(client: Client, reader: Reader, nbytes: int) -> None:
    data = os.urandom(nbytes)
    ref = client.put(data, name=f"sizes/{nbytes}")
    assert (ref.nbytes, ref.shape, ref.kind) == (nbytes, (nbytes,), "plain")
    assert client.get(ref) == client.get(ref.name) == data
    view = reader.resolve([ref])[0]
    assert view.tobytes() == data
    del view
    assert client.release([ref]) == 1


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "int32", "float32", "int64", "float64"])
def test_arrays_keep_dtype_and_shape(client: Client, reader: Reader, dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    ref = client.put(array, name=f"arrays/{dtype}", dtype=dtype, shape=array.shape, meta={"a": [1]})
    view = reader.resolve([ref])[0]
    assert (view.dtype, view.shape, ref.meta) == (array.dtype, array.shape, {"a": [1]})
    assert np.array_equal(view, array)
    assert view.__array_interface__["data"][0] % 64 == 0
    assert pa.py_buffer(array) is not None


def test_the_same_content_again_is_the_same_object_and_other_content_is_refused(client: Client) -> None:
    for nbytes in (100, PUT_IN_PLACE_FROM):
        data = bytes(nbytes)
        first = client.put(data, name=f"twice/{nbytes}")
        used = client.stat()["used_bytes"]
        assert client.put(data, name=f"twice/{nbytes}") == first
        assert client.stat()["used_bytes"] == used
        with pytest.raises(BadRequestError, match="exists with other content"):
            client.put(b"x" * nbytes, name=f"twice/{nbytes}")
        assert client.stat()["used_bytes"] == used
        client.release([first])
        client.release([client.put(b"x" * nbytes, name=f"twice/{nbytes}")])


def test_a_source_is_named_by_its_bytes(client: Client) -> None:
    data = encode(noise(1))
    ref = client.put_source(data, {"file": "a.png"})
    assert ref.name == f"s/{content_digest(data)}"
    assert client.put_source(data).name == ref.name
    assert ref.kind == "source"
    client.release([ref])


def test_a_full_node_says_what_was_wanted_and_what_is_free(node: EmbeddedNode) -> None:
    with Client(node.uri, timeout_s=60) as client:
        held = [client.put(os.urandom(4 << 20), name=f"full/{at}") for at in range(3)]
        client.timeout_s = 2
        with pytest.raises(OutOfSpaceError, match=r"wanted_bytes=8388608 free_bytes=.*leased_bytes=0"):
            client.put(bytes(8 << 20), name="full/more")
        client.timeout_s = 60
        with pytest.raises(OutOfSpaceError, match="can never fit"):
            client.put(bytes(17 << 20), name="full/huge")
        client.release(held)
        client.release([client.put(bytes(8 << 20), name="full/more")])


def test_a_missing_object_is_named(client: Client, reader: Reader) -> None:
    ref = client.put(b"x", name="gone")
    client.release([ref])
    for attempt in (lambda: client.get("gone"), lambda: client.get(ref), lambda: reader.resolve([ref])):
        with pytest.raises(MissingObjectError, match="gone"):
            attempt()


def test_many_threads_share_one_client_and_one_reader(client: Client, reader: Reader) -> None:
    wrong = []

    def work(seed: int) -> None:
        for turn in range(8):
            data = os.urandom(1000 + seed if turn % 2 else PUT_IN_PLACE_FROM + seed)
            ref = client.put(data, name=f"threads/{seed}/{turn}")
            if reader.resolve([ref])[0].tobytes() != data:
                wrong.append((seed, turn))
            client.release([ref])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_any_flight_client_can_put_and_get_without_this_project(node: EmbeddedNode) -> None:
    client = fl.FlightClient(node.uri)
    table = pa.table({"x": pa.array(range(1000), pa.float32())})
    writer, answers = client.do_put(fl.FlightDescriptor.for_path("plain"), table.schema)
    writer.write_table(table, max_chunksize=300)
    writer.done_writing()
    assert b'"dtype":"float32"' in answers.read().to_pybytes()
    writer.close()
    reader = client.do_get(fl.Ticket(b'{"name": "plain"}'))
    assert reader.schema.metadata[b"dtype"] == b"float32" and reader.schema.metadata[b"shape"] == b"[1000]"
    data = reader.read_all().column("data").combine_chunks().to_numpy()
    assert np.array_equal(data.view(np.float32), np.arange(1000, dtype=np.float32))
    client.close()


def test_a_put_that_stops_in_the_middle_gives_its_room_back_at_its_deadline(node: EmbeddedNode, client: Client) -> None:
    used = client.stat()["used_bytes"]
    flight = fl.FlightClient(node.uri)
    batch = pa.record_batch({"data": pa.array(np.zeros(1 << 20, np.uint8))})
    announced = b'{"name": "stopped", "dtype": "uint8", "shape": [2097152], "timeout_s": 3.0}'
    writer, answers = flight.do_put(fl.FlightDescriptor.for_command(announced), batch.schema)
    writer.write_batch(batch)
    wait_until(lambda: client.stat()["used_bytes"] == used + (2 << 20))
    wait_until(lambda: client.stat()["used_bytes"] == used)
    other = client.put(bytes(2 << 20), name="other")
    with pytest.raises(fl.FlightError, match="1048576 of 2097152 bytes, and no end, at its deadline"):
        writer.write_batch(batch)
        writer.done_writing()
        answers.read()
        writer.close()
    assert client.get(other) == bytes(2 << 20)
    client.release([other])
    flight.close()


def test_a_node_that_is_not_there_is_named() -> None:
    with Client("grpc://127.0.0.1:1", timeout_s=5) as client:
        with pytest.raises(NodeUnavailableError, match=r"grpc://127\.0\.0\.1:1.*is it running"):
            client.stat()
    with pytest.raises(NodeUnavailableError, match="is it running"):
        Reader("grpc://127.0.0.1:1", timeout_s=5)
    with pytest.raises(BadRequestError, match="is not the address"):
        Client("nonsense")


def open_arenas() -> list[str]:
    """Return the arenas of running nodes of which this process holds a descriptor."""
    gc.collect()
    opened = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            opened.append(str(fd.readlink()))
    return [path for path in opened if "/dataplane-" in path and "deleted" not in path]


def test_a_put_that_fails_in_the_middle_gives_its_place_back_and_keeps_nothing_open(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = client.stat()["used_bytes"]
    data = bytes(PUT_IN_PLACE_FROM)

    def broken(*args: object) -> int:
        raise OSError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", broken)
        with pytest.raises(OSError, match="no luck"):
            client.put(data, name="middle")
    wait_until(lambda: client.stat()["used_bytes"] == used)
    client.release([client.put(data, name="middle")])
    wait_until(lambda: not open_arenas())  # readers of earlier tests may still be letting go of theirs
    client._inplace_put._lock.acquire()
    client.timeout_s = 0.1
    with pytest.raises(TimeoutError, match=r"put in 0\.1 s"):
        client.put(data, name="middle")
    client._inplace_put._lock.release()


def test_a_hundred_clients_and_readers_leave_no_file_open(node: EmbeddedNode) -> None:
    def use() -> None:
        with Client(node.uri) as client, Reader(node.uri) as reader:
            reader.resolve([client.put(b"fd", name="fd")])

    use()
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(100):
        use()
    wait_until(lambda: process.num_fds() <= before + 10)
