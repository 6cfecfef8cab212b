"""Tests a store with random operations in random order: live slabs never overlap, and leased objects never change."""

import itertools
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.core.errors import OutOfSpaceError
from dataplane.core.refs import Kind, Ref
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.arena import Segment
from dataplane.storage.disk_files import DiskFiles
from dataplane.storage.entries import Entry, Leased, Slab, Written
from dataplane.storage.store import INTERNAL_SESSION, Store

CAPACITY = 64 * 1024
SIZES = st.integers(0, CAPACITY // 2)
PICK = st.integers(0, 1 << 16)


class StoreMachine(RuleBasedStateMachine):
    """A store with a small arena and a small disk, and a model of what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.disk = DiskFiles(self.folder, 4 * CAPACITY, "n")
        self.segment = Segment(CAPACITY, "machine")
        self.store = Store(self.segment, self.disk)
        self.numbers = itertools.count(1)
        self.open: list[tuple[Slab, int]] = []
        self.leased: list[tuple[Leased, np.ndarray]] = []
        self.content: dict[str, np.ndarray] = {}
        self.kept: set[str] = set()
        self.scope_of: dict[str, str] = {}
        self.scopes: set[str] = set()

    @rule(nbytes=SIZES, scope=st.sampled_from(["", "a", "b"]))
    def allocate(self, nbytes: int, scope: str) -> None:
        try:
            opened = scope if scope in self.scopes else None
            slab = self.store.allocate(nbytes, time.monotonic(), opened)
        except OutOfSpaceError as error:
            assert "wanted_bytes" in str(error)
            return
        number = next(self.numbers)
        self.store.view(slab)[:] = number % 251
        self.open.append((slab, number))

    @precondition(lambda self: self.open)
    @rule(pick=PICK, kind=st.sampled_from(["plain", "derived"]), is_durable=st.booleans())
    def seal(self, pick: int, kind: Kind, is_durable: bool) -> None:
        slab, number = self.open.pop(pick % len(self.open))
        if slab.scope is not None and not slab.scope.is_open:
            self.store.abort(slab)
            return
        name, data = f"{kind}/{number}", self.store.view(slab).copy()
        ref = Ref(name=name, kind=kind, dtype="uint8", shape=(slab.nbytes,), nbytes=slab.nbytes, node="n", lineage=None)
        file = None
        if is_durable and kind == "plain":
            try:
                file = self.store.disk.write_durable(slab, self.store.view(slab), ref, _digest(data))
            except OutOfSpaceError:
                self.store.abort(slab)
                return
        self.store.publish([Written(slab, ref, _digest(data), is_held=kind == "plain", file=file)])
        self.content[name] = data
        if slab.scope is not None:
            self.scope_of[name] = slab.scope.name
        if kind == "plain" or slab.scope is not None:
            self.kept.add(name)

    @precondition(lambda self: self.open)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        self.store.abort(self.open.pop(pick % len(self.open))[0])

    @precondition(lambda self: self.content)
    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        name = sorted(self.content)[pick % len(self.content)]
        leased = self.store.lease_one(name)
        assert leased is not None or name not in self.kept, f"{name} was lost"
        if leased is not None:
            self.leased.append((leased, self.content[name]))

    @precondition(lambda self: self.leased)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        self.store.end_leases([self.leased.pop(pick % len(self.leased))[0].lease], INTERNAL_SESSION)

    @precondition(lambda self: self.content)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        name = sorted(self.content)[pick % len(self.content)]
        self.store.release([name])
        if name.startswith("plain"):
            del self.content[name]
            self.scope_of.pop(name, None)
            self.kept.discard(name)
        elif name not in self.scope_of:
            self.kept.discard(name)

    @rule(scope=st.sampled_from(["a", "b"]))
    def open_scope(self, scope: str) -> None:
        self.store.scopes.open(scope, 3 * CAPACITY // 4)
        self.scopes.add(scope)

    @precondition(lambda self: self.scopes)
    @rule(pick=PICK)
    def close_scope(self, pick: int) -> None:
        scope = sorted(self.scopes)[pick % len(self.scopes)]
        self.store.scopes.close(scope)
        self.scopes.discard(scope)
        for name in [name for name, at in self.scope_of.items() if at == scope]:
            del self.scope_of[name]
            self.kept.discard(name)
            if name.startswith("plain"):
                del self.content[name]

    @invariant()
    def leased_content_never_changes(self) -> None:
        for leased, data in self.leased:
            assert np.array_equal(self.store.content(leased.entry), data)

    @invariant()
    def live_slabs_do_not_overlap(self) -> None:
        entries: set[Entry] = {leased.entry for leased, _ in self.leased}
        entries |= set(self.store._table.entries.values())
        slabs = [entry.slab for entry in entries if entry.slab is not None] + [slab for slab, _ in self.open]
        spans = sorted((slab.offset, slab.offset + slab_bytes(slab.nbytes)) for slab in slabs)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert self.store.stat()["used_bytes"] == sum(end - start for start, end in spans)

    def teardown(self) -> None:
        for slab, _ in self.open:
            self.store.abort(slab)
        for leased, _ in self.leased:
            self.store.end_leases([leased.lease], INTERNAL_SESSION)
        for scope in self.scopes:
            self.store.scopes.close(scope)
        names = list(self.store._table.entries)
        self.store.release(names)
        for name in names:
            entry = self.store.find(name)
            if entry is not None:
                self.store._table.drop(entry)
        stat = self.store.stat()
        empty = ("used_bytes", "spilled_bytes", "scoped_bytes", "evictable_bytes", "num_leases", "num_objects")
        assert {name: stat[name] for name in empty} == dict.fromkeys(empty, 0)
        assert not list(self.folder.glob("*/*.arrow")) and not list(self.folder.glob("durable/objects/*"))
        self.store.close()
        self.disk.close()
        self.segment.unlink()
        shutil.rmtree(self.folder)


def _digest(data: np.ndarray) -> str:
    from dataplane.core.digests import content_digest

    return content_digest(data)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
