"""Tests of byte connections between nodes: an object arrives whole and verified or not at all, keys guard the port, and
Flight is used if there is no port."""

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.download import RANGES_FROM
from dataplane.client.embedded import EmbeddedNode
from dataplane.cluster import byte_connections
from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.digests import content_digest, version_of
from dataplane.core.errors import (
    BadRequestError,
    ChecksumError,
    DataPlaneError,
    MissingObjectError,
    OutOfSpaceError,
    PeerError,
)
from dataplane.core.refs import Ref
from dataplane.derive.derived_refs import derived_ref
from dataplane.media.recipes import parse_recipe
from dataplane.server import byte_keys, byte_port
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.arena import Segment
from dataplane.storage.store import Store
from tests.dataplane.certificates import issue
from tests.dataplane.serving import refused, serving
from tests.dataplane.shards import RECIPE, encode, noise, wait_until

MIB = 1 << 20
READ = "read-0123456789abcdef"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNode]:
    """Node `a`, with a small arena, so that objects are spilled."""
    spill = tmp_path_factory.mktemp("spill")
    with EmbeddedNode(memory_bytes=48 * MIB, roots={}, node_id="a", host_id="elsewhere", spill_dir=spill) as started:
        yield started


@pytest.fixture
def owner(home: EmbeddedNode) -> Iterator[Client]:
    with Client(home.uri, timeout_s=30) as opened:
        yield opened


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for byte connections, so that a slow machine does not switch to Flight: these tests count
    connections."""
    monkeypatch.setattr(byte_connections, "_CONNECT_S", 20.0)


class Fetching:
    """A store and a fetcher in this process, like those of a node `b`."""

    def __init__(
        self, uri: str, memory_bytes: int = 64 * MIB, credentials: Credentials | None = None, stall_s: float = 20.0
    ) -> None:
        self._segment = Segment(memory_bytes, "b")
        self.store = Store(self._segment)
        peers = PeerDirectory("b", {"a": uri}, None)
        self.fetcher = PeerFetcher(self.store, peers, num_streams=3, stall_s=stall_s, credentials=credentials)

    def __enter__(self) -> "Fetching":
        return self

    def __exit__(self, *exc: object) -> None:
        self.fetcher.close()
        self.store.close()
        self._segment.unlink()

    def fetch(self, refs: Sequence[Ref], timeout_s: float = 30.0) -> list[np.ndarray]:
        """Fetch the objects and return copies of those that arrived."""
        entries = [self.store.find(name) for name in self.fetch_names(refs, timeout_s)]
        return [np.array(self.store.content(entry)) for entry in entries if entry is not None]

    def fetch_names(self, refs: Sequence[Ref], timeout_s: float) -> list[str]:
        """Fetch the objects and return the names of those that arrived."""
        futures: dict[str, Future[Ref]] = {ref.name: Future() for ref in refs}

        def land(ref: Ref, result: Ref | DataPlaneError) -> None:
            if isinstance(result, Ref):
                futures[ref.name].set_result(result)
            else:
                futures[ref.name].set_exception(result)

        self.fetcher.start(refs, time.monotonic() + timeout_s, land, is_makeable=False)
        return [future.result(timeout_s + 5).name for future in futures.values()]

    def used_bytes(self) -> int:
        return self.store.stat()["used_bytes"]


def put_all(client: Client, sizes: Sequence[int], prefix: str) -> tuple[list[np.ndarray], list[Ref]]:
    rng = np.random.default_rng(len(sizes))
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    return arrays, [client.put(array, name=f"{prefix}/{at}") for at, array in enumerate(arrays)]


def verbs(client: Client) -> dict[str, int]:
    return {verb: counts["num_calls"] for verb, counts in client.stat()["verbs"].items()}


# -- what comes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [0, 1, 100, 4096, 130 << 10, MIB, (5 << 20) + 17, 0],
        [1 + 37 * at for at in range(1000)],
        [(12 << 20) + 1] * 3,
        [RANGES_FROM + 12_345],
    ],
    ids=["mixed", "many small", "several parts", "ranges"],
)
def test_objects_come_whole_over_byte_connections_and_none_over_flight(
    owner: Client, home: EmbeddedNode, sizes: list[int]
) -> None:
    arrays, refs = put_all(owner, sizes, "sizes")
    before = owner.stat()
    with Fetching(home.uri) as here:
        assert all(np.array_equal(got, array) for got, array in zip(here.fetch(refs), arrays, strict=True))
        counts = here.fetcher.stat()
        assert (counts["num_fetched"], counts["fetched_bytes"]) == (len(refs), sum(sizes))
        assert counts["num_fetch_retries"] == 0
    wait_until(lambda: owner.stat()["streams"].get("get_bytes", 0) == 0)  # their calls count when they are over
    after = owner.stat()
    num_lanes = after["verbs"]["get_bytes"]["num_calls"] - before["verbs"].get("get_bytes", {}).get("num_calls", 0)
    assert 1 <= num_lanes <= 3
    assert after["sent_bytes"] - before["sent_bytes"] == sum(sizes)
    assert after["verbs"].get("DoGet") == before["verbs"].get("DoGet")
    owner.release(refs)
    assert after["num_leases"] == 0


def test_spilled_objects_come_from_their_files(owner: Client, home: EmbeddedNode) -> None:
    arrays, refs = put_all(owner, [8 * MIB] * 9, "spilled")
    assert owner.stat()["num_spilled"] >= 3
    with Fetching(home.uri, memory_bytes=80 * MIB) as here:
        assert all(np.array_equal(got, array) for got, array in zip(here.fetch(refs), arrays, strict=True))
    owner.release(refs)


def test_an_arena_that_holds_less_than_a_run_takes_one_object_after_the_other(
    owner: Client, home: EmbeddedNode
) -> None:
    _, refs = put_all(owner, [MIB] * 6, "tight")
    with Fetching(home.uri, memory_bytes=2 * MIB) as here:
        assert here.fetch_names(refs, 20) == [ref.name for ref in refs]
        with pytest.raises(DataPlaneError, match="can never fit"):
            here.fetch(put_all(owner, [3 * MIB], "never")[1])
        assert len(here.fetch(refs[:1])) == 1
    owner.release(refs)


def test_what_is_not_resident_is_made_on_demand_and_what_cannot_be_says_so(owner: Client, home: EmbeddedNode) -> None:
    source = owner.put_source(encode(noise(900)))
    wanted = derived_ref(source, parse_recipe(RECIPE).model_dump(), "a")
    _, gone = put_all(owner, [100], "gone")
    owner.release(gone)
    port, key = offered(home.uri)
    with dialled(port, key) as connected:
        read_frame(connected)
        connected.sendall(frame({"refs": [wanted.to_dict(), gone[0].to_dict()], "local": True, "timeout_s": 30}))
        objects: dict[int, Any] = {}
        while "end" not in (header := read_frame(connected)):
            for info in header["objects"]:
                objects[info["at"]] = info
                if "ref" in info:
                    data = read_exactly(connected, info["ref"]["nbytes"])
                    assert content_digest(data) == info["checksum"] == info["ref"]["meta"]["checksum"]
    assert objects[0]["ref"]["name"] == wanted.name
    assert objects[1]["error"] == "MissingObjectError" and "gone/0 is not on node a" in objects[1]["message"]
    with Fetching(home.uri) as here, pytest.raises(MissingObjectError, match="gone/0 is not on node a"):
        here.fetch(gone)


# -- who may come --------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Node]:
    """A node in this process."""
    node = Node(NodeConfig(memory_bytes=4 * MIB, node_id="a"))
    try:
        yield node
    finally:
        node.stop()


def offered(uri: str, token: str = "") -> tuple[int, bytes]:
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())] if token else [])
    with fl.FlightClient(uri) as flight:
        (result,) = flight.do_action(fl.Action("bytes", b"{}"), options)
    body = json.loads(result.body.to_pybytes())
    return body["port"], bytes.fromhex(body["key"])


def frame(body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("!I", len(raw)) + raw


def read_exactly(connected: socket.socket, nbytes: int) -> bytes:
    """Read exactly `nbytes` bytes. MSG_WAITALL would not wait on a socket with a timeout."""
    data = b""
    while len(data) < nbytes:
        part = connected.recv(nbytes - len(data))
        if not part:
            raise ConnectionError(f"closed after {len(data)} of {nbytes} bytes")
        data += part
    return data


def read_frame(connected: socket.socket) -> dict[str, Any]:
    (nbytes,) = struct.unpack("!I", read_exactly(connected, 4))
    return dict(json.loads(read_exactly(connected, nbytes)))


@contextmanager
def dialled(port: int, *sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connected:
        for part in sent:
            connected.sendall(part)
        yield connected


def is_closed(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_key_works_once_soon_and_nothing_else_works(served: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.services.byte_keys is not None
    with dialled(served.services.byte_keys.port, bytes(32)) as wrong:
        assert is_closed(wrong)
    port, key = offered(served.uri)
    with dialled(port, key) as first:
        assert read_frame(first) == {"node": "a"}
        with dialled(port, key) as second:
            assert is_closed(second)
    monkeypatch.setattr(byte_keys, "KEY_S", 0.0)
    with dialled(*offered(served.uri)) as late:
        assert is_closed(late)
    monkeypatch.setattr(byte_port, "SHOW_S", 0.3)
    with dialled(port, key[:31]) as slow:
        assert is_closed(slow)
    assert served.services.meter.verbs()["get_bytes"].num_errors == 3  # the slow one showed none


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (frame(b"no json"), "not JSON"),
        (frame({}), "ref is NoneType"),
        (frame({"refs": 5}), "refs is '5'"),
        (frame({"refs": [], "timeout_s": -1}), "timeout_s is -1"),
        (struct.pack("!I", 65 << 20) + b"x" * 100, "wanted at most 67108864"),
        (b"\xff" * 64, "wanted at most 67108864"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_and_ends_the_connection(
    served: Node, request_bytes: bytes, error: str
) -> None:
    port, key = offered(served.uri)
    with dialled(port, key, request_bytes) as connected:
        read_frame(connected)
        answer = read_frame(connected)
        assert answer["error"] == "BadRequestError" and error in answer["message"]
        assert is_closed(connected)
    with Client(served.uri, timeout_s=10) as client:
        assert client.stat()["verbs"]["get_bytes"]["num_errors"] == 1


def test_keys_unproven_and_connections_are_bounded(served: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.services.byte_keys is not None
    port = served.services.byte_keys.port
    unproven = [socket.create_connection(("127.0.0.1", port)) for _ in range(byte_port.MAX_UNPROVEN)]
    with dialled(port) as refused_one:
        assert is_closed(refused_one)
    for connection in unproven:
        connection.close()
    wait_until(lambda: not served._byte_port._open)  # type: ignore[union-attr]
    with dialled(*offered(served.uri)) as connected:
        assert read_frame(connected) == {"node": "a"}
    monkeypatch.setattr(byte_keys, "MAX_KEYS", 3)
    monkeypatch.setattr(byte_keys, "KEY_S", 600.0)
    with pytest.raises(fl.FlightError, match="were asked for"):
        for _ in range(4):
            offered(served.uri)


def test_leases_end_when_a_receiver_goes_away_in_the_middle(served: Node) -> None:
    with Client(served.uri, timeout_s=10) as client:
        ref = client.put(bytes(3 * MIB), name="half")
        port, key = offered(served.uri)
        with dialled(port, key, frame({"refs": [ref.to_dict()] * 20})) as connected:
            read_frame(connected)
            assert read_frame(connected)["objects"]
        wait_until(lambda: client.stat()["num_leases"] == 0)
        wait_until(lambda: not served._byte_port._open)  # type: ignore[union-attr]
        assert client.stat()["errors"]["StreamLostError"] >= 1


def test_a_receiver_that_takes_nothing_is_cut(served: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_port, "STALL_S", 3.0)  # it has as long to show its key
    with Client(served.uri, timeout_s=10) as client:
        ref = client.put(bytes(3 * MIB), name="slow")
        port, key = offered(served.uri)
        with dialled(port, key, frame({"refs": [ref.to_dict()] * 50})):
            wait_until(lambda: client.stat()["errors"].get("StreamLostError", 0) == 1)
            assert client.stat()["num_leases"] == 0


def test_nothing_is_left_when_a_node_stops() -> None:
    def num_connections() -> int:
        return sum(one.laddr.port == port for one in psutil.Process().net_connections("tcp"))

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name in ("byte-port", "bytes")]

    node = Node(NodeConfig(memory_bytes=MIB, node_id="a"))
    port, key = offered(node.uri)
    with dialled(port, key) as working, dialled(port) as unproven:
        read_frame(working)
        wait_until(lambda: len(names()) == 3)
        assert num_connections() == 3
        node.stop()
        assert is_closed(working) and is_closed(unproven)
    assert names() == []
    assert num_connections() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_token_is_wanted_for_a_key_and_checked_again_with_every_request(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{READ} read\n")
    tokens.chmod(0o600)
    with serving(tmp_path / "log", "--token-file", str(tokens)) as guarded:
        with pytest.raises(fl.FlightUnauthenticatedError):
            offered(guarded.uri)
        port, key = offered(guarded.uri, READ)
        with dialled(port, key) as connected:
            read_frame(connected)
            connected.sendall(frame({"refs": []}))
            assert read_frame(connected) == {"end": True}
            other = tmp_path / "other"
            other.write_text("another-0123456789abcdef read\n")
            other.chmod(0o600)
            other.replace(tokens)
            connected.sendall(frame({"refs": []}))
            assert read_frame(connected)["error"] == "UnauthenticatedError"
            assert is_closed(connected)
        assert key.hex() not in guarded.log()


# -- where there is none -------------------------------------------------------------------------------------------


def test_objects_come_over_flight_where_the_port_cannot_be_reached_and_that_is_said_once(
    owner: Client, home: EmbeddedNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> socket.socket:
        raise ConnectionRefusedError("no way")

    arrays, refs = put_all(owner, [1000, MIB], "walled")
    before = verbs(owner).get("DoGet", 0)
    with Fetching(home.uri) as here, monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("dataplane.cluster.byte_connections.socket.create_connection", refuse)
        num_keys = verbs(owner).get("bytes", 0)
        for ref, array in zip(refs, arrays, strict=True):
            assert np.array_equal(here.fetch([ref])[0], array)
        assert verbs(owner)["bytes"] == num_keys + 1  # it is not tried again for a while
    assert verbs(owner)["DoGet"] == before + 2
    assert len([record for record in caplog.records if "objects come over Flight" in record.message]) == 1
    owner.release(refs)


def test_nodes_with_tls_fetch_over_flight_and_take_no_port_for_bytes(tmp_path: Path) -> None:
    authority = issue(tmp_path, "authority")
    server = issue(tmp_path, "server", authority)
    flags = ["--tls-cert", str(server.cert_file), "--tls-key", str(server.key_file)]
    assert "leave --peer-port out" in refused(*flags, "--peer-port", "8816")
    known = Credentials(tls_ca=authority.cert_file)
    with serving(tmp_path / "log", *flags, "--node-id", "a") as guarded:
        with Client(guarded.uri, timeout_s=20, credentials=known) as client:
            ref = client.put(bytes(1000), name="x")
            with Fetching(guarded.uri, credentials=known) as here:
                assert here.fetch([ref])[0].nbytes == 1000
            assert "bytes" not in verbs(client) and verbs(client)["DoGet"] == 1


def test_a_port_that_is_taken_is_refused_with_its_flag(served: Node) -> None:
    assert served.services.byte_keys is not None
    with pytest.raises(
        BadRequestError, match=f"--peer-port {served.services.byte_keys.port} on 127.0.0.1 cannot be used"
    ):
        Node(NodeConfig(memory_bytes=MIB, peer_port=served.services.byte_keys.port))


# -- senders that lie ----------------------------------------------------------------------------------------------


class Liar(fl.FlightServerBase):
    """A fake node `a` that answers every request with the same frames. Of Flight it knows only the action `bytes`."""

    def __init__(self, *frames: bytes, is_silent: bool = False) -> None:
        """With `is_silent`, the fake sends nothing after the frames and keeps the connection open; otherwise it closes
        the connection."""
        super().__init__("grpc://127.0.0.1:0")
        self.uri = f"grpc://127.0.0.1:{self.port}"
        self.num_requests = 0
        self._frames = frames
        self._is_silent = is_silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        return [json.dumps({"port": self._listener.getsockname()[1], "key": bytes(32).hex()}).encode()]

    def shutdown(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        super().shutdown()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            with connected, contextlib.suppress(OSError):  # who asked may have heard enough
                read_exactly(connected, 32)
                connected.sendall(frame({"node": "a"}))
                read_frame(connected)
                self.num_requests += 1
                connected.sendall(b"".join(self._frames))
                if self._is_silent:
                    connected.recv(1)


GOOD = np.random.default_rng(5).integers(0, 256, 200_000, np.uint8)
DIGEST = content_digest(GOOD)
WANTED = Ref(
    name="lie",
    kind="plain",
    dtype="uint8",
    shape=(len(GOOD),),
    nbytes=len(GOOD),
    node="a",
    lineage=None,
    version=version_of(DIGEST),
)
END = frame({"end": True})


def described(**more: Any) -> bytes:
    return frame({"objects": [{"at": 0, "checksum": DIGEST, **more}]})


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([described(checksum="0" * 32), GOOD.tobytes(), END], "arrived with digest"),
        ([described(), GOOD[::-1].tobytes(), END], "arrived with digest"),
        ([described(), GOOD[:-1].tobytes()], "closed the connection in the middle|did not finish"),
        ([described(), GOOD.tobytes()[:-1], END], "closed the connection in the middle|did not finish"),
        ([END], "ended before everything had come"),
        ([described(at=1), GOOD.tobytes(), END], "came twice, or was not asked for"),
        ([described(at=True), GOOD.tobytes(), END], "at is 'True'"),
        ([frame({"objects": [{"at": 0, "checksum": DIGEST}] * 2}), GOOD.tobytes() * 2, END], "came twice"),
        ([described(ref=replace(WANTED, shape=(3, 3)).to_dict()), GOOD.tobytes(), END], "takes 9 bytes"),
        ([described(ref=replace(WANTED, name="other").to_dict()), GOOD.tobytes(), END], "came instead of"),
        ([described(ref=[5])], "not a ref"),
        ([frame({"objects": [5]})], "describes an object as a int"),
        ([frame({"objects": 5})], "objects is '5'"),
        ([frame(b"[")], "not JSON"),
        ([b"\xff\xff\xff\xff"], "a header of 4294967295 bytes"),
    ],
)
def test_a_sender_that_lies_publishes_nothing_and_costs_no_memory(frames: list[bytes], message: str) -> None:
    with Liar(*frames) as liar, Fetching(liar.uri, memory_bytes=4 * MIB) as here:
        with pytest.raises((PeerError, ChecksumError, BadRequestError), match=message):
            here.fetch([WANTED], timeout_s=4.0)
        assert liar.num_requests >= 1
        assert here.store.find("lie") is None
        assert here.used_bytes() == 0


def test_a_sender_of_another_version_or_too_much_is_refused_and_drained() -> None:
    there = replace(WANTED, version=7)
    huge = replace(WANTED, shape=(8 * MIB,), nbytes=8 * MIB)
    for frames, message in (
        ([described(ref=there.to_dict()), GOOD.tobytes(), END], "was released and written again"),
        ([described(ref=huge.to_dict()), bytes(8 * MIB), END], "can never fit"),
    ):
        with Liar(*frames) as liar, Fetching(liar.uri, memory_bytes=4 * MIB) as here:
            with pytest.raises(DataPlaneError, match=message):
                here.fetch([WANTED])
            assert liar.num_requests == 1
            assert here.used_bytes() == 0


def test_wrong_bytes_in_a_full_arena_are_the_senders_fault_and_cost_no_memory() -> None:
    other = replace(WANTED, name="other", shape=(900_000,), nbytes=900_000, version=0)
    both = [{"at": 0, "checksum": "0" * 32}, {"at": 1, "checksum": content_digest(bytes(900_000))}]
    frames = (frame({"objects": both}), GOOD.tobytes(), bytes(900_000), END)
    with Liar(*frames) as liar, Fetching(liar.uri, memory_bytes=MIB) as here:
        with pytest.raises(ChecksumError, match=r"lie could not be fetched.*lie arrived with digest"):
            here.fetch([WANTED, other], timeout_s=20.0)
        assert liar.num_requests == 3
        assert here.used_bytes() == 0


def test_no_room_is_not_the_senders_fault() -> None:
    with Liar(described(), GOOD.tobytes(), END) as liar, Fetching(liar.uri, memory_bytes=MIB) as here:
        taken = here.store.allocate(900_000, time.monotonic())
        with pytest.raises(OutOfSpaceError, match="wanted_bytes"):
            here.fetch([WANTED], timeout_s=5.0)
        assert liar.num_requests == 1
        here.store.abort(taken)
        assert np.array_equal(here.fetch([WANTED])[0], GOOD)


def test_a_sender_that_falls_silent_is_cut() -> None:
    with Liar(described(), is_silent=True) as liar, Fetching(liar.uri, memory_bytes=4 * MIB, stall_s=1.0) as here:
        started = time.monotonic()
        with pytest.raises(PeerError):
            here.fetch([WANTED], timeout_s=4.0)
        assert time.monotonic() - started < 30.0 and liar.num_requests >= 1
        assert here.used_bytes() == 0
