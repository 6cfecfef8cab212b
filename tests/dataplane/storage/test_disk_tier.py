"""Tests of a disk that fails in the middle of an operation: no bytes of another object are shown, nothing acknowledged
is lost, and no lease stays."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.core.errors import MissingObjectError, OutOfSpaceError
from dataplane.core.refs import Ref
from dataplane.server.publish import publish_puts
from dataplane.server.put_request import PutRequest
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.arena import Segment
from dataplane.storage.disk_files import DiskFile, DiskFiles
from dataplane.storage.entries import Entry
from dataplane.storage.group_commit import GroupCommit
from dataplane.storage.store import INTERNAL_SESSION, Store

BLOCK = 64 * 1024


class Kit:
    """A store of four blocks over a disk. `again` starts a new store over the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = DiskFiles(folder, 100 * BLOCK, "n")
        self.segment = Segment(4 * BLOCK, "test")
        self.store = Store(self.segment, self.disk)

    def put(self, name: str, *, scope: str | None = None, nbytes: int = BLOCK, **said: Any) -> Ref:
        """Store `nbytes` bytes, each the last letter of the name."""
        slab = self.store.allocate(nbytes, time.monotonic(), scope)
        self.store.view(slab)[:] = ord(name[-1])
        request = PutRequest.from_body({"name": name, "scope": scope, **said})
        return publish_puts(self.store, [slab], [request], "uint8", "n")[0]

    def entry(self, name: str) -> Entry:
        """Return the entry of a resident object."""
        found = self.store.find(name)
        assert found is not None
        return found

    def check(self) -> None:
        """Check that every resident object has a slab of its own with the stored bytes, and that nothing is leased."""
        entries = [entry for entry in self.store._table.entries.values() if entry.slab is not None]
        used = sum(slab_bytes(entry.slab.nbytes) for entry in entries if entry.slab is not None)
        assert self.store.stat()["used_bytes"] == used
        for entry in self.store._table.entries.values():
            assert (self.store.content(entry) == ord(entry.ref.name[-1])).all()
            if entry.file is not None:
                assert entry.file.path.exists()

    def again(self) -> None:
        """Start the next store over the same folder."""
        self.close()
        self.__init__(self.folder)  # type: ignore[misc]
        self.store.disk.recover()

    def close(self) -> None:
        """Stop without releasing anything."""
        self.store.close()
        self.disk.close()
        self.segment.unlink()


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.close()


def fail_after(num_good: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with a fault: it raises OSError from call `num_good` + 1 on."""
    left = [num_good]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        return method(*args)

    return call


def test_a_keeper_that_cannot_be_noted_does_not_leave_an_object_over_a_free_slab(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.store.scopes.open("s")
    with monkeypatch.context() as patched:
        patched.setattr(kit.disk, "keep", fail_after(0, kit.disk.keep))
        with pytest.raises(OutOfSpaceError):
            kit.put("a", scope="s", durable=True)
    check_that_nothing_stayed(kit)
    for name in "bcd":
        kit.put(name)
    kit.check()


def test_a_file_that_cannot_be_committed_is_removed_with_its_mark(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.store.scopes.open("s")
    with monkeypatch.context() as patched:
        patched.setattr(GroupCommit, "commit", fail_after(0, GroupCommit.commit))
        with pytest.raises(OutOfSpaceError):
            kit.put("a", scope="s", durable=True)
    check_that_nothing_stayed(kit)


def check_that_nothing_stayed(kit: Kit) -> None:
    """Check that there is no object, no file of one, and no mark of one."""
    assert kit.store.find("a") is None and kit.store.stat()["used_bytes"] == 0
    assert list((kit.folder / "durable" / "objects").iterdir()) == []
    kept = [path.name for path in (kit.folder / "durable" / "keeps").rglob("*") if path.is_file()]
    assert set(kept) <= {"scope.json"}


@pytest.mark.parametrize("scope", [None, "t"])
def test_a_slab_whose_object_came_again_is_given_back_once(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, scope: str | None
) -> None:
    for name in "st":
        kit.store.scopes.open(name)
    kit.put("a", scope="s", durable=True)
    monkeypatch.setattr(kit.disk, "keep", fail_after(0, kit.disk.keep))
    assert kit.put("a", scope=scope) == kit.entry("a").ref
    kit.put("b")
    kit.put("c", nbytes=2 * BLOCK)
    kit.check()


def test_a_durable_file_that_was_taken_over_is_not_discarded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.store.scopes.open("s")
    kit.put("a", scope="s")
    monkeypatch.setattr(kit.disk, "keep", fail_after(1, kit.disk.keep))
    kit.put("a", durable=True)
    assert kit.entry("a").is_held
    kit.check()
    kit.again()
    assert kit.entry("a").is_held and kit.store.stat()["num_durable"] == 1


def test_a_durable_put_again_into_another_scope_fails_whole_or_survives_in_it(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.store.scopes.open("s")
    kit.store.scopes.open("t")
    ref = kit.put("a", scope="s", durable=True)
    with monkeypatch.context() as patched:
        patched.setattr(kit.disk, "keep", fail_after(0, kit.disk.keep))
        with pytest.raises(OutOfSpaceError):
            kit.put("a", scope="t", durable=True)
    assert not kit.store._table.scopes.find("t").members
    kit.check()
    assert kit.put("a", scope="t", durable=True) == ref
    kit.again()
    assert {scope.name for scope in kit.entry("a").scopes} == {"s", "t"}


def test_a_durable_put_over_an_object_without_a_hash_acknowledges_what_the_file_says(kit: Kit) -> None:
    first = kit.put("a", hash=False, meta={"step": 1})
    second = kit.put("a", durable=True, meta={"step": 2})
    assert second == first
    for name in "bcdef":
        kit.put(name)
    leased = kit.store.lease_one("a")
    assert leased is not None and leased.entry.slab is None
    kit.store.end_leases([leased.lease], INTERNAL_SESSION)
    kit.check()
    kit.again()
    assert kit.entry("a").ref == first


def test_a_second_release_of_one_place_is_refused(kit: Kit) -> None:
    slab = kit.store.allocate(BLOCK, time.monotonic())
    kit.store.abort(slab)
    with pytest.raises(ValueError, match="not allocated"):
        kit.store.abort(slab)
    assert kit.store.stat()["used_bytes"] == 0


def test_all_objects_join_a_scope_or_none(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.store.scopes.open("s")
    for name in "ab":
        kit.put(name, durable=True)
    with pytest.raises(MissingObjectError, match="nowhere"):
        kit.store.scopes.join(["a", "b"], "nowhere", time.monotonic())
    scope = kit.store._table.scopes.find("s")
    with monkeypatch.context() as patched:
        patched.setattr(kit.disk, "keep", fail_after(1, kit.disk.keep))
        with pytest.raises(OutOfSpaceError):
            kit.store.scopes.join(["a", "b"], "s", time.monotonic())
    assert (scope.used_bytes, scope.members) == (0, set())
    assert kit.store.scopes.join(["a", "b", "c"], "s", time.monotonic()) == ["c"]
    assert scope.members == {"a", "b"}
    kit.again()
    assert kit.store._table.scopes.find("s").members == {"a", "b"}


def test_what_became_durable_while_it_was_spilled_keeps_its_durable_file(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        kit.put(name)
    write, turns = kit.disk.write, []

    def write_and_put(ref: Ref, digest: str, data: np.ndarray) -> Any:
        if not turns:
            turns.append(kit.put(ref.name, durable=True))
        return write(ref, digest, data)

    monkeypatch.setattr(kit.disk, "write", write_and_put)
    kit.put("d", nbytes=2 * BLOCK)
    assert turns
    entry = kit.entry(turns[0].name)
    assert entry.file is not None and entry.file.is_durable and entry.slab is None
    kit.check()
    kit.store.release("abcd")
    assert kit.store.stat()["spilled_bytes"] == 0
    assert not list(kit.folder.glob("**/*.arrow"))


@pytest.mark.parametrize("error", [MemoryError("no"), KeyboardInterrupt()])
def test_a_spill_that_fails_in_any_way_leaks_no_lease(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    for name in "abcd":
        kit.put(name)

    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(kit.disk, "write", fail)
        with pytest.raises((OutOfSpaceError, KeyboardInterrupt)):
            kit.put("e", nbytes=3 * BLOCK)
    stat = kit.store.stat()
    assert (stat["num_leases"], stat["spilled_bytes"], stat["num_objects"]) == (0, 0, 4)


def test_a_disk_that_hiccuped_takes_held_objects_again_and_a_put_waits_for_that(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.storage.spill_budget._PAUSE_S", 0.3)
    for name in "ab":
        kit.put(name)
    with monkeypatch.context() as patched:
        patched.setattr("dataplane.storage.disk_files.write_ipc", fail_after(0, kit.disk.write))
        with pytest.raises(OutOfSpaceError):
            kit.put("z", nbytes=4 * BLOCK)
        for name in "cd":
            kit.put(name)
    slab = kit.store.allocate(4 * BLOCK, time.monotonic() + 10)
    assert kit.store.stat()["num_spilled"] == 4
    kit.store.abort(slab)
    kit.check()


def test_files_go_without_the_lock_of_the_store(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.store.scopes.open("s")
    for name in "abc":
        kit.put(name, durable=True, scope="s" if name == "c" else None)
    remove, was_free = kit.disk.remove, []

    def remove_slowly(file: DiskFile) -> None:
        other = threading.Thread(target=kit.store.stat, daemon=True)
        other.start()
        other.join(20)
        was_free.append(not other.is_alive())
        remove(file)

    monkeypatch.setattr(kit.disk, "remove", remove_slowly)
    assert kit.store.release("ab") == 2
    assert kit.store.scopes.close("s") == (1, BLOCK)
    assert was_free == [True] * 3
    assert not list(kit.folder.glob("**/*.arrow"))
