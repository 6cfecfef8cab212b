"""Tests of the store's accounts by hand: scopes with their quotas, leases, the order of eviction, the spill budget."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataplane.core.errors import BadRequestError, MissingObjectError, OutOfSpaceError
from dataplane.core.refs import Ref
from dataplane.storage import retention_marks, scopes
from dataplane.storage.disk_files import OVERHEAD_BYTES, DiskFiles, charge_bytes
from dataplane.storage.entries import Entry, Slab
from dataplane.storage.eviction import choose_victims
from dataplane.storage.eviction_order import EvictionOrder
from dataplane.storage.leases import Leases
from dataplane.storage.retention_marks import RetentionMarks
from dataplane.storage.scopes import Scope, Scopes
from dataplane.storage.spill_budget import SpillBudget
from dataplane.storage.store_lock import StoreLock
from tests.dataplane.storage.test_disk_tier import BLOCK, Kit


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.close()


def entry(name: str, nbytes: int = 64, *, is_held: bool = False) -> Entry:
    ref = Ref(name=name, kind="plain", dtype="uint8", shape=(nbytes,), nbytes=nbytes, node="n", lineage=None)
    return Entry(ref, Slab(0, nbytes), is_held)


# -- scopes --------------------------------------------------------------------------------------------------------


def test_a_quota_takes_what_fills_it_exactly_and_refuses_one_byte_more() -> None:
    scope = Scope("s", 100)
    scope.reserve(60)
    assert scope.has_room(40) and not scope.has_room(41)
    scope.give_back(10)
    assert scope.used_bytes == 50 and scope.has_room(50) and not scope.has_room(51)
    scope.check_ever_fits(100)
    with pytest.raises(OutOfSpaceError, match="wanted_bytes=101 used_bytes=50 quota_bytes=100"):
        scope.check_ever_fits(101)
    unlimited = Scope("u", None)
    unlimited.check_ever_fits(10**15)
    assert unlimited.has_room(10**15)


def test_a_scope_has_one_quota_and_ends_with_its_last_client(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Scopes()
    first = table.open("s", 100, ["a"])
    assert table.open("s", 100, ["b"]) is first and table.find("s") is first
    with pytest.raises(BadRequestError, match="open with quota_bytes=100, asked for was 99"):
        table.open("s", 99, ["c"])
    assert first.owners == {"a", "b"} and len(table) == 1
    other = table.open("t", None, ["a"])
    assert table.leave("a") == [other] and table.leave("a") == [] and table.leave("b") == [first]
    assert first.is_open
    assert table.close("s") is first and not first.is_open
    for call in (table.find, table.close):
        with pytest.raises(MissingObjectError, match="'s' is not open"):
            call("s")
    monkeypatch.setattr(scopes, "MAX_SCOPES", 2)
    table.open("u", None, [])
    with pytest.raises(BadRequestError, match="2 scopes are open; close some before 'v'"):
        table.open("v", None, [])
    table.open("u", None, ["a"])  # it is open already


def test_an_object_larger_than_its_scopes_quota_is_refused_at_once(kit: Kit) -> None:
    kit.store.scopes.open("s", BLOCK)
    started = time.monotonic()
    with pytest.raises(OutOfSpaceError, match=f"scope 's' has no room .* quota_bytes={BLOCK}"):
        kit.store.allocate(BLOCK + 1, started + 30, "s")
    assert time.monotonic() - started < 15
    assert kit.store.allocate(BLOCK, time.monotonic(), "s").nbytes == BLOCK


# -- leases --------------------------------------------------------------------------------------------------------


def test_leases_end_by_number_or_with_their_session_and_only_the_last_one_frees_its_target() -> None:
    leases: Leases[str] = Leases()
    for session in ("one", "two"):
        leases.open_session(session)
    a, b = leases.grant_all(["a", "b"], "one")
    other = leases.grant("a", "two")
    assert len({a, b, other}) == 3 and len(leases) == 3
    assert (leases.count("a"), leases.count("b"), leases.count("c")) == (2, 1, 0)
    assert leases.end([a, b, a, 999], "two") == [], "those of another session, and unknown ones"
    assert leases.end([b, a, a], "one") == ["b"]
    assert set(leases.targets()) == {"a"} and len(leases) == 1
    assert leases.end_session("two") == ["a"] and leases.end_session("two") == []
    assert (leases.count("a"), len(leases), leases.num_sessions) == (0, 0, 1)
    assert leases.has_session("one") and not leases.has_session("two")
    with pytest.raises(KeyError):
        leases.grant("a", "two")
    assert leases.grant("a", "one") not in (a, b, other), "no number comes twice"


# -- the order of eviction -----------------------------------------------------------------------------------------


def test_the_oldest_goes_first_and_the_bytes_are_those_of_all() -> None:
    order = EvictionOrder(lambda entry: entry.ref.nbytes)
    assert not order
    first, second, third = (entry(name, nbytes) for name, nbytes in (("a", 1), ("b", 20), ("c", 300)))
    for one in (first, second, third, first):
        order.add(one)
    assert list(order) == [first, second, third] and order.total_bytes == 321 and order
    order.make_youngest("a")
    order.make_youngest("missing")
    assert list(order) == [second, third, first]
    order.make_oldest("c")
    order.make_oldest("missing")
    assert list(order) == [third, second, first]
    order.remove(second)
    order.remove(second)
    assert list(order) == [third, first] and order.total_bytes == 301


# -- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "num_pages"), [(0, 0), (1, 1), (4096, 1), (4097, 2), (3 * 4096, 3)])
def test_a_file_counts_in_whole_pages_and_its_overhead(nbytes: int, num_pages: int) -> None:
    assert charge_bytes(nbytes) == num_pages * 4096 + OVERHEAD_BYTES


def test_the_budget_takes_files_until_it_is_full_and_pauses_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskFiles(tmp_path, 2 * charge_bytes(4096), "n")
    budget = SpillBudget(disk, lambda work: work())
    try:
        assert budget.is_on and budget.takes_bytes == disk.budget_bytes == budget.budget_bytes
        assert budget.reserve(4096) and budget.reserve(4096) and not budget.reserve(0)
        assert budget.used_bytes == disk.budget_bytes and budget.takes_bytes == 0
        assert not budget.may_fit(4096)
        spilled = entry("a", 4096)
        budget.losable.add(spilled)
        assert budget.may_fit(4096) and not budget.may_fit(4097) and budget.takes_bytes == charge_bytes(4096)
        budget.take_back(spilled, None)
        assert budget.used_bytes == charge_bytes(4096)
        assert "spilling failed" not in budget.describe()
        budget.failed(OSError(28, "No space left on device"))
        assert not budget.is_on and budget.takes_bytes == 0 and "No space left" in budget.describe()
        assert 4.0 < budget.paused_until - time.monotonic() <= 5.0
        monkeypatch.setattr(budget, "paused_until", time.monotonic())
        assert budget.is_on
    finally:
        disk.close()
    without = SpillBudget(None, lambda work: work())
    assert not without.is_on and without.takes_bytes == 0 and "with --spill DIR" in without.describe()
    assert not without.may_fit(0) and not without.reserve(0)


def test_a_spilled_object_that_becomes_durable_is_charged_once(kit: Kit) -> None:
    ref = kit.put("a")
    for name in "bcde":
        kit.put(name)
    spilled = kit.entry("a").file
    assert spilled is not None and not spilled.is_durable
    assert kit.put("a", durable=True) == ref
    assert kit.entry("a").is_durable and not spilled.path.exists()
    num_files = sum(kit.entry(name).file is not None for name in "abcde")
    assert kit.store.stat()["spilled_bytes"] == num_files * charge_bytes(BLOCK)
    kit.store.release(["a"])
    assert kit.store.find("a") is None
    assert kit.store.stat()["spilled_bytes"] == (num_files - 1) * charge_bytes(BLOCK)


def test_an_object_can_go_if_the_disk_takes_exactly_its_file(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.put("a")
    monkeypatch.setattr(SpillBudget, "takes_bytes", charge_bytes(BLOCK))
    assert kit.store._table.room_bytes == BLOCK
    monkeypatch.setattr(SpillBudget, "takes_bytes", charge_bytes(BLOCK) - 1)
    assert kit.store._table.room_bytes == 0


@pytest.mark.parametrize(
    ("free", "evictable", "chosen"),
    [
        ([], [(0, 50), (110, 150), (50, 110)], [2, 1]),  # 100 bytes go instead of 110, although they are further on
        ([], [(110, 150), (0, 40), (40, 110)], [1, 2]),  # 110 bytes either way: the first
        ([(200, 260)], [(0, 50), (160, 200), (300, 390)], [1]),  # younger ones stay
        ([(0, 90)], [(100, 190)], []),  # a gap between them
    ],
)
def test_of_the_oldest_those_with_the_fewest_bytes_make_room(
    free: list[tuple[int, int]], evictable: list[tuple[int, int]], chosen: list[int]
) -> None:
    assert choose_victims(free, evictable, lambda start, end: end - start >= 100) == chosen


def test_files_that_are_written_and_mapped_leave_no_descriptor_open(kit: Kit) -> None:
    kit.put("a", durable=True)
    before = open_files(kit.folder)
    for turn in range(3):
        kit.put(f"turn/{turn}", durable=True)
    for name in "bcdefg":
        kit.put(name)
    assert kit.store.stat()["num_spilled"] > 0
    assert open_files(kit.folder) == before


def open_files(folder: Path) -> list[str]:
    """Return the files in a folder that this process has open. Connections of earlier tests may end at any moment."""
    paths = [file.path for file in psutil.Process().open_files()]
    return sorted(path for path in paths if Path(path).is_relative_to(folder.resolve()))


def test_the_bytes_of_an_object_cannot_be_written_through_a_view(kit: Kit) -> None:
    kit.put("a")
    for name in ("a", "a"):
        view = kit.store.content(kit.entry(name))
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        for other in "bcde":
            if kit.store.find(other) is None:
                kit.put(other)  # the second time it comes from its file
    assert kit.entry("a").slab is None


# -- waiting -------------------------------------------------------------------------------------------------------


def test_a_wait_ends_at_its_deadline_with_the_shortage_and_earlier_at_the_time_to_wake() -> None:
    lock = StoreLock()
    with lock:
        with pytest.raises(OutOfSpaceError, match="too little"):
            lock.wait(time.monotonic() - 1, lambda: "too little")
        with pytest.raises(OutOfSpaceError, match="too little"):
            lock.wait(time.monotonic() + 0.01, lambda: "too little", time.monotonic() - 1)
        lock.wait(time.monotonic() + 60, lambda: "too little", time.monotonic() + 0.01)
        ran: list[bool] = []
        lock.run_after_unlock(lambda: ran.append(True))
        assert not ran
    assert ran == [True]


def test_names_on_the_disk_are_synced_after_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test what a loss of power would show: a folder's new names last only once the folder is synced."""
    synced: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        retention_marks,
        "sync_directory",
        lambda folder: synced.append((folder.name, sorted(path.name for path in folder.iterdir()))),
    )
    marks, scope = RetentionMarks(tmp_path, tmp_path / "objects"), Scope("s", None)
    folder = marks.keep(tmp_path / "objects" / "one.arrow", scope)
    assert synced == [(tmp_path.name, sorted(["held", folder.name])), (folder.name, ["scope.json"])]
    marks.keep(tmp_path / "objects" / "two.arrow", scope)
    assert len(synced) == 2, "the state is the same"
    scope.owners.add("client")
    marks.update_scope(scope)
    assert synced[2:] == [(folder.name, ["one", "scope.json", "two"])]
    assert marks.keep(tmp_path / "objects" / "one.arrow", None) == tmp_path / "held"
