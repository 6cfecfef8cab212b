"""Tests of fetching from another node: an object arrives whole and verified or not at all, whatever the sender does."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.download import RANGES_FROM
from dataplane.client.embedded import EmbeddedNode
from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.digests import content_digest, version_of
from dataplane.core.errors import ChecksumError, DataPlaneError, MissingObjectError, OutOfSpaceError, PeerError
from dataplane.core.refs import Ref
from dataplane.core.schemas import PIECES
from dataplane.derive.derived_refs import derived_ref
from dataplane.media.recipes import parse_recipe
from dataplane.storage.arena import Segment
from dataplane.storage.store import Store
from tests.dataplane.certificates import issue
from tests.dataplane.serving import serving
from tests.dataplane.shards import RECIPE, encode, noise, wait_until

MIB = 1 << 20


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


# -- what comes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [0, 1, 12, 13, 100, 4096, 130 << 10, MIB, (5 << 20) + 17, 0],
        [1 + 37 * at for at in range(1000)],
        [(12 << 20) + 1] * 3,
        [RANGES_FROM + 12_345],
    ],
    ids=["mixed", "many small", "several pieces", "ranges"],
)
def test_objects_come_whole(owner: Client, home: EmbeddedNode, sizes: list[int]) -> None:
    arrays, refs = put_all(owner, sizes, "sizes")
    before = owner.stat()
    with Fetching(home.uri) as here:
        assert all(np.array_equal(got, array) for got, array in zip(here.fetch(refs), arrays, strict=True))
        counts = here.fetcher.stat()
        assert (counts["num_fetched"], counts["fetched_bytes"]) == (len(refs), sum(sizes))
        assert counts["num_fetch_retries"] == 0
    wait_until(lambda: owner.stat()["num_leases"] == 0)
    after = owner.stat()
    num_streams = after["verbs"]["DoGet"]["num_calls"] - before["verbs"].get("DoGet", {}).get("num_calls", 0)
    assert 1 <= num_streams <= 3
    assert after["sent_bytes"] - before["sent_bytes"] >= sum(sizes)
    owner.release(refs)


def test_spilled_objects_come_from_their_files(owner: Client, home: EmbeddedNode) -> None:
    arrays, refs = put_all(owner, [8 * MIB] * 9, "spilled")
    assert owner.stat()["num_spilled"] >= 3
    with Fetching(home.uri, memory_bytes=80 * MIB) as here:
        assert all(np.array_equal(got, array) for got, array in zip(here.fetch(refs), arrays, strict=True))
    owner.release(refs)


def test_an_arena_that_holds_less_than_a_batch_takes_one_object_after_the_other(
    owner: Client, home: EmbeddedNode
) -> None:
    _, refs = put_all(owner, [MIB // 2] * 12, "tight")
    with Fetching(home.uri, memory_bytes=MIB) as here:
        assert here.fetch_names(refs, 20) == [ref.name for ref in refs]
        assert here.fetcher.stat()["num_fetch_retries"] == 0
        with pytest.raises(DataPlaneError, match="can never fit"):
            here.fetch(put_all(owner, [3 * MIB], "never")[1])
        assert len(here.fetch(refs[:1])) == 1
    owner.release(refs)


def test_what_is_not_resident_is_made_on_demand_and_what_cannot_be_says_so(owner: Client, home: EmbeddedNode) -> None:
    source = owner.put_source(encode(noise(900)))
    wanted = derived_ref(source, parse_recipe(RECIPE).to_dict(), "a")
    _, gone = put_all(owner, [100], "gone")
    owner.release(gone)
    with Fetching(home.uri) as here:
        assert len(here.fetch([wanted])) == 1
        entry = here.store.find(wanted.name)
        assert entry is not None and entry.ref.meta["checksum"] == content_digest(here.store.content(entry))
        with pytest.raises(MissingObjectError, match="gone/0 is not on node a"):
            here.fetch([wanted, *gone])


def test_a_receiver_that_takes_nothing_holds_leases_until_its_deadline(owner: Client, home: EmbeddedNode) -> None:
    _, refs = put_all(owner, [8 * MIB] * 4, "slow")
    with fl.FlightClient(home.uri) as flight:
        ticket = fl.Ticket(json.dumps({"refs": [ref.to_dict() for ref in refs]}).encode())
        began_s = time.monotonic()
        stream = flight.do_get(ticket, fl.FlightCallOptions(timeout=4.0))
        stream.read_chunk()
        # until gRPC's buffers are full, there are moments without a lease, between one object and the next
        wait_until(lambda: all(owner.stat()["num_leases"] for _ in range(20)))
        wait_until(lambda: not any(owner.stat()["num_leases"] for _ in range(20)))
        assert time.monotonic() - began_s >= 4.0
    owner.release(refs)


def test_nodes_with_tls_fetch_with_the_credentials_of_the_fetcher(tmp_path: Path) -> None:
    authority = issue(tmp_path, "authority")
    server = issue(tmp_path, "server", authority)
    flags = ["--tls-cert", str(server.cert_file), "--tls-key", str(server.key_file)]
    known = Credentials(tls_ca=authority.cert_file)
    with serving(tmp_path / "log", *flags, "--node-id", "a") as guarded:
        with Client(guarded.uri, timeout_s=20, credentials=known) as client:
            ref = client.put(bytes(1000), name="x")
            with Fetching(guarded.uri, credentials=known) as here:
                assert here.fetch([ref])[0].nbytes == 1000


# -- senders that lie ----------------------------------------------------------------------------------------------


class Liar(fl.FlightServerBase):
    """A fake node `a` that answers every DoGet with the same batches."""

    def __init__(
        self, *batches: pa.RecordBatch, schema: pa.Schema = PIECES, is_silent: bool = False, is_broken: bool = False
    ) -> None:
        """After the batches the stream ends. With `is_silent` it stays open without data, and with `is_broken` it
        breaks."""
        super().__init__("grpc://127.0.0.1:0")
        self.uri = f"grpc://127.0.0.1:{self.port}"
        self.num_requests = 0
        self._batches = batches
        self._schema = schema
        self._is_silent = is_silent
        self._is_broken = is_broken
        self._is_over = threading.Event()

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        self.num_requests += 1
        return fl.GeneratorStream(self._schema, self._sent())

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()  # Flight waits for the end of its streams
        super().__exit__(*exc)

    def _sent(self) -> Iterator[pa.RecordBatch]:
        yield from self._batches
        if self._is_silent:
            self._is_over.wait(30)
        if self._is_broken:
            raise fl.FlightUnavailableError("the host went away")


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


def pieces(*rows: tuple[int, int, str, bytes | np.ndarray]) -> pa.RecordBatch:
    """Return a batch of (object, start, info, data)."""
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
    columns[3] = [bytes(data) for data in columns[3]]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, PIECES, strict=True)], schema=PIECES)


def info(**more: Any) -> str:
    return json.dumps({"checksum": DIGEST, **more})


def far_view() -> pa.RecordBatch:
    """Return a batch whose view points behind the end of its buffer."""
    good = pieces((0, 0, info(), GOOD))
    views = np.frombuffer(good.column(3).buffers()[1], np.int32).copy()
    views[3] = 4096
    column = pa.Array.from_buffers(pa.binary_view(), 1, [None, pa.py_buffer(views), good.column(3).buffers()[2]], 0)
    return pa.RecordBatch.from_arrays([*good.columns[:3], column], schema=PIECES)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([pieces((0, 0, info(checksum="0" * 32), GOOD))], "arrived with digest"),
        ([pieces((0, 0, info(), GOOD[::-1]))], "arrived with digest"),
        ([pieces((0, 0, info(), GOOD[:-1]))], "ended after 199999 of 200000 bytes"),
        ([pieces((0, 0, info(), GOOD[:9])), pieces((0, 9, info(), GOOD[9:]))], "ended after 9 of 200000 bytes"),
        ([pieces((0, 0, info(), GOOD[:9])), pieces((0, 10, "", GOOD[9:]))], "wanted them in order"),
        ([pieces((0, 0, info(), bytes(GOOD) + b"x"))], "wanted them in order"),
        ([], "ended before everything had come"),
        ([pieces((0, 0, "", GOOD))], "without a description"),
        ([pieces((1, 0, info(), GOOD))], "a stream of 1 objects brought bytes of number 1"),
        ([pieces((-1, 0, info(), GOOD))], "a stream of 1 objects brought bytes of number -1"),
        ([pieces((0, 0, info(ref=replace(WANTED, shape=(3, 3)).to_dict()), GOOD))], "takes 9 bytes"),
        ([pieces((0, 0, info(ref=replace(WANTED, name="other").to_dict()), GOOD))], "came instead of"),
        ([pieces((0, 0, info(ref=[5]), GOOD))], "not a ref"),
        ([pieces((0, 0, "[", GOOD))], "not JSON"),
        ([pieces((0, 0, "5", GOOD))], "info of an object"),
        ([far_view()], "references range 4096-204096"),
    ],
)
def test_a_sender_that_lies_publishes_nothing_and_costs_no_memory(batches: list[pa.RecordBatch], message: str) -> None:
    with Liar(*batches) as liar, Fetching(liar.uri, memory_bytes=4 * MIB) as here:
        with pytest.raises(DataPlaneError, match=message):
            here.fetch([WANTED], timeout_s=4.0)
        assert liar.num_requests >= 1
        assert here.store.find("lie") is None
        assert here.used_bytes() == 0


def test_a_stream_of_another_schema_is_refused() -> None:
    other = pa.record_batch({"data": pa.array([1, 2], pa.uint8())})
    with Liar(other, schema=other.schema) as liar, Fetching(liar.uri, memory_bytes=4 * MIB) as here:
        with pytest.raises(PeerError, match="a stream of many objects came as"):
            here.fetch([WANTED], timeout_s=4.0)


def test_a_sender_of_another_version_or_too_much_is_refused_and_drained() -> None:
    there = replace(WANTED, version=7)
    huge = replace(WANTED, shape=(8 * MIB,), nbytes=8 * MIB)
    for batch, message in (
        (pieces((0, 0, info(ref=there.to_dict()), GOOD)), "was released and written again"),
        (pieces((0, 0, info(ref=huge.to_dict()), bytes(8 * MIB))), "can never fit"),
    ):
        with Liar(batch) as liar, Fetching(liar.uri, memory_bytes=4 * MIB) as here:
            with pytest.raises(DataPlaneError, match=message):
                here.fetch([WANTED])
            assert liar.num_requests == 1
            assert here.used_bytes() == 0


def test_what_was_whole_before_the_stream_broke_is_not_requested_again() -> None:
    other = replace(WANTED, name="other")
    with (
        Liar(pieces((0, 0, info(), GOOD)), is_broken=True) as liar,
        Fetching(liar.uri, memory_bytes=4 * MIB) as here,
    ):
        assert here.fetch_names([WANTED, other], timeout_s=20.0) == ["lie", "other"]
        assert liar.num_requests == 2  # the second one for `other` alone, which is then object 0
        assert here.fetcher.stat()["num_fetch_retries"] == 1


def test_wrong_bytes_in_a_full_arena_are_the_senders_fault_and_cost_no_memory() -> None:
    other = replace(WANTED, name="other", shape=(900_000,), nbytes=900_000, version=0)
    zeros = content_digest(bytes(900_000))
    batch = pieces((0, 0, info(checksum="0" * 32), GOOD), (1, 0, info(checksum=zeros), bytes(900_000)))
    with Liar(batch) as liar, Fetching(liar.uri, memory_bytes=MIB) as here:
        with pytest.raises(ChecksumError, match=r"lie could not be fetched.*lie arrived with digest"):
            here.fetch([WANTED, other], timeout_s=20.0)
        assert liar.num_requests == 3
        assert here.used_bytes() == 0


def test_no_room_is_not_the_senders_fault() -> None:
    with Liar(pieces((0, 0, info(), GOOD))) as liar, Fetching(liar.uri, memory_bytes=MIB) as here:
        taken = here.store.allocate(900_000, time.monotonic())
        with pytest.raises(OutOfSpaceError, match="wanted_bytes"):
            here.fetch([WANTED], timeout_s=5.0)
        assert liar.num_requests == 1
        here.store.abort(taken)
        assert np.array_equal(here.fetch([WANTED])[0], GOOD)


def test_a_sender_that_falls_silent_is_cut() -> None:
    begun = pieces((0, 0, info(), GOOD[:1000]))
    with Liar(begun, is_silent=True) as liar, Fetching(liar.uri, memory_bytes=4 * MIB, stall_s=1.0) as here:
        started = time.monotonic()
        with pytest.raises(PeerError):
            here.fetch([WANTED], timeout_s=4.0)
        assert time.monotonic() - started < 30.0 and liar.num_requests >= 2
        assert here.used_bytes() == 0
