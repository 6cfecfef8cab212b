"""Tests of eviction, holds, leases and back-pressure of the store, on a real segment without a server."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dataplane.core.errors import BadRequestError, OutOfSpaceError
from dataplane.core.refs import Kind, Ref
from dataplane.server.publish import publish_puts
from dataplane.server.put_request import PutRequest
from dataplane.storage.arena import Segment
from dataplane.storage.disk_files import DiskFiles
from dataplane.storage.entries import Written
from dataplane.storage.store import INTERNAL_SESSION, Store
from tests.dataplane.shards import wait_until

BLOCK = 64 * 1024


@pytest.fixture
def store() -> Iterator[Store]:
    segment = Segment(4 * BLOCK, "test")
    opened = Store(segment)
    yield opened
    opened.close()
    segment.unlink()


def add(store: Store, name: str, kind: Kind = "derived", nbytes: int = BLOCK, timeout_s: float = 0.0) -> None:
    slab = store.allocate(nbytes, time.monotonic() + timeout_s)
    store.view(slab)[:] = ord(name[-1])
    ref = Ref(name=name, kind=kind, dtype="uint8", shape=(nbytes,), nbytes=nbytes, node="n", lineage=None)
    store.publish([Written(slab, ref, is_held=kind == "plain")])


def names(store: Store) -> set[str]:
    return {name for name in "abcdefg" if store.find(name)}


def test_the_least_recently_used_object_is_evicted_first(store: Store) -> None:
    for name in "abcd":
        add(store, name)
    leased = store.lease_one("a")
    assert leased is not None
    store.end_leases([leased.lease], INTERNAL_SESSION)
    add(store, "e")
    add(store, "f")
    assert names(store) == {"a", "d", "e", "f"}
    assert store.stat()["num_evicted"] == 2


def test_no_room_tells_how_much_stays_until_it_is_released(store: Store) -> None:
    add(store, "a")
    leased = store.lease_one("a")
    add(store, "b", kind="plain")
    with pytest.raises(OutOfSpaceError, match=rf"\bheld_bytes={BLOCK}\b"):
        add(store, "c", nbytes=4 * BLOCK)
    assert leased is not None
    store.end_leases([leased.lease], INTERNAL_SESSION)


def test_leases_end_although_an_earlier_end_failed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "a")
    first, second = store.lease_one("a"), store.lease_one("a")
    assert first is not None and second is not None
    real, failed = store.end_leases, threading.Event()

    def fail(leases: Sequence[int], session: str) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store, "end_leases", fail)
        store.end_later(first.lease)
        assert failed.wait(5)
    store.end_later(second.lease)
    wait_until(lambda: store.stat()["num_leases"] == 1)
    real([first.lease], INTERNAL_SESSION)
    assert store.stat()["num_leases"] == 0


def test_no_file_is_dropped_for_one_that_would_not_fit_anyway(tmp_path: Path) -> None:
    segment, disk = Segment(4 * BLOCK, "test"), DiskFiles(tmp_path, 100 * BLOCK, "n")
    store = Store(segment, disk)
    try:
        for name in "abcdefg":
            add(store, name)
        assert store.stat()["num_spilled"] == 3
        assert not store._table.reserve_file(101 * BLOCK)
        assert store.stat()["num_spilled"] == 3
        store._table.spill.failed(OSError(28, "No space left on device"))
        assert store._table.reserve_file(98 * BLOCK), "files that may be lost make room where that is enough"
    finally:
        store.close()
        disk.close()
        segment.unlink()


def test_plain_objects_are_never_evicted_and_the_error_has_the_numbers(store: Store) -> None:
    for name in "abcd":
        add(store, name, kind="plain")
    with pytest.raises(OutOfSpaceError, match=f"wanted_bytes={BLOCK} free_bytes=0 .*leased_bytes=0"):
        add(store, "e")
    assert names(store) == set("abcd")


def test_a_leased_slab_is_not_recycled_before_its_lease_ends(store: Store) -> None:
    for name in "abcd":
        add(store, name)
    store.open_session("reader")
    leased = store.lease(["a", "b", "c", "d"], "reader")
    assert all(leased)
    with pytest.raises(OutOfSpaceError, match=f"leased_bytes={4 * BLOCK}"):
        add(store, "e")
    store.end_session("reader")
    add(store, "e")
    assert names(store) == set("bcde")


def test_a_released_object_keeps_its_bytes_until_its_last_lease_ends(store: Store) -> None:
    add(store, "a", kind="plain", nbytes=4 * BLOCK)
    store.open_session("reader")
    leased = store.lease(["a", "a"], "reader")
    assert store.release(["a"]) == 1
    assert store.find("a") is None
    store.end_leases([leased[0].lease], "reader")  # type: ignore[union-attr]
    with pytest.raises(OutOfSpaceError):
        add(store, "b")
    assert leased[1] is not None and store.content(leased[1].entry)[7] == ord("a")
    store.end_leases([leased[1].lease], "reader")
    add(store, "b")


def test_leases_of_another_session_cannot_be_ended(store: Store) -> None:
    add(store, "a")
    store.open_session("one")
    store.open_session("two")
    leased = store.lease(["a"], "one")[0]
    assert leased is not None
    store.end_leases([leased.lease], "two")
    assert store.stat()["num_leases"] == 1


def test_a_put_that_does_not_fit_waits_until_room_is_made(store: Store) -> None:
    add(store, "a", kind="plain", nbytes=4 * BLOCK)
    threading.Timer(0.2, store.release, [["a"]]).start()
    add(store, "b", timeout_s=10)
    assert names(store) == {"b"}


def test_nothing_is_evicted_for_an_object_that_would_not_fit_anyway(store: Store) -> None:
    add(store, "a", kind="plain", nbytes=2 * BLOCK)
    add(store, "b")
    with pytest.raises(OutOfSpaceError):
        add(store, "c", nbytes=3 * BLOCK)
    assert names(store) == {"a", "b"}
    with pytest.raises(OutOfSpaceError, match="can never fit"):
        add(store, "d", nbytes=5 * BLOCK)


def test_a_released_source_is_the_first_to_go(store: Store) -> None:
    for name in "abcd":
        add(store, name)
    store.release(["c"])
    add(store, "e")
    assert names(store) == set("abde")


def test_a_second_object_of_one_name_is_not_kept(store: Store) -> None:
    add(store, "a")
    add(store, "a")
    assert store.stat()["num_objects"] == 1
    assert store.stat()["used_bytes"] == BLOCK


def test_a_segment_is_private_and_says_when_shared_memory_is_too_small(store: Store, tmp_path: Path) -> None:
    assert store.segment.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OutOfSpaceError, match=r"free of .*; wanted .*--memory"):
        Segment(1 << 50, "test")
    with pytest.raises(OutOfSpaceError, match=r"does not exist.* and the machine has only"):
        Segment(1 << 50, "test", tmp_path / "nowhere")


def test_with_holds_in_between_only_what_makes_room_is_evicted(store: Store) -> None:
    add(store, "a")
    add(store, "b", kind="plain")
    add(store, "c")
    add(store, "d")
    add_more = [store.lease_one("d")]
    assert add_more[0] is not None
    with pytest.raises(OutOfSpaceError):
        add(store, "e", nbytes=2 * BLOCK)
    assert names(store) == set("abcd")
    store.end_leases([add_more[0].lease], INTERNAL_SESSION)
    add(store, "e", nbytes=2 * BLOCK)
    assert names(store) == set("abe")
    assert store.stat()["num_evicted"] == 2


def test_of_two_writers_of_one_plain_name_the_loser_is_refused(store: Store) -> None:
    barrier = threading.Barrier(2, timeout=10)
    refused: list[str] = []
    sealed: list[Ref] = []

    def write(turn: int, fill: int) -> None:
        slab = store.allocate(BLOCK, time.monotonic() + 5)
        store.view(slab)[:] = fill
        request = PutRequest.from_body({"name": f"race/{turn}"})
        barrier.wait()
        try:
            sealed.append(publish_puts(store, [slab], [request], "uint8", "n")[0])
        except BadRequestError as error:
            refused.append(str(error))

    for turn in range(50):
        threads = [threading.Thread(target=write, args=(turn, fill)) for fill in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        store.release([f"race/{turn}"])
    assert (len(sealed), len(refused)) == (50, 50)
    assert "exists with other content" in refused[0]


def test_two_who_want_many_places_do_not_block_one_another(store: Store) -> None:
    store.segment.bytes[:] = 0
    add(store, "a", kind="plain")
    got: list[int] = []
    errors: list[Exception] = []
    barrier = threading.Barrier(2, timeout=10)

    def want() -> None:
        try:
            for _ in range(20):
                barrier.wait()
                slabs = store.allocate_many([BLOCK] * 2, time.monotonic() + 20)
                got.append(len(slabs))
                for slab in slabs:
                    store.abort(slab)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (got, errors) == ([2] * 40, [])
    assert store.stat()["used_bytes"] == BLOCK


def test_who_waits_for_many_places_holds_none_meanwhile(store: Store) -> None:
    add(store, "a", kind="plain", nbytes=2 * BLOCK)
    waiting = threading.Thread(target=lambda: store.allocate_many([BLOCK] * 3, time.monotonic() + 20))
    waiting.start()
    wait_until(lambda: bool(store._lock._condition._waiters))  # type: ignore[attr-defined]
    assert store.stat()["used_bytes"] == 2 * BLOCK
    add(store, "b", kind="plain", nbytes=2 * BLOCK)
    store.release("ab")
    waiting.join(20)
    assert not waiting.is_alive() and store.stat()["used_bytes"] == 3 * BLOCK
    with pytest.raises(OutOfSpaceError, match=f"wanted_bytes={2 * BLOCK} free_bytes={BLOCK}"):
        store.allocate_many([BLOCK] * 2, time.monotonic())
    with pytest.raises(OutOfSpaceError, match="5 objects of 320 KiB can never fit"):
        store.allocate_many([BLOCK] * 5, time.monotonic())
    assert store.stat()["used_bytes"] == 3 * BLOCK


def test_a_big_allocation_does_not_wait_for_ever_behind_small_ones(store: Store) -> None:
    stop, errors, num_small = threading.Event(), [], [0]

    def churn() -> None:
        try:
            while not stop.is_set():
                slab = store.allocate(BLOCK, time.monotonic() + 30)
                stop.wait(0.01)
                store.abort(slab)
                num_small[0] += 1
        except OutOfSpaceError as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: store.stat()["used_bytes"] == 4 * BLOCK)
        big = store.allocate(4 * BLOCK, time.monotonic() + 15)
        store.abort(big)
        before = num_small[0]
        wait_until(lambda: num_small[0] > before + 20)  # the small ones go on
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not errors and store.stat()["used_bytes"] == 0


def test_a_small_allocation_with_little_time_left_passes_a_big_one_that_has_its_turn(store: Store) -> None:
    held = store.allocate(BLOCK, 0.0)
    big = threading.Thread(target=lambda: store.abort(store.allocate(4 * BLOCK, time.monotonic() + 30)), daemon=True)
    big.start()
    wait_until(lambda: store._allocation._turns.of_another(object(), time.monotonic()) > 0)
    small = store.allocate(BLOCK, time.monotonic() + 0.5)
    later = threading.Thread(target=lambda: store.abort(store.allocate(BLOCK, time.monotonic() + 30)), daemon=True)
    later.start()
    later.join(0.2)
    assert later.is_alive(), "what has time leaves the room to the big one"
    for slab in (held, small):
        store.abort(slab)
    for thread in (big, later):
        thread.join(10)
        assert not thread.is_alive()
    assert store.stat()["used_bytes"] == 0
