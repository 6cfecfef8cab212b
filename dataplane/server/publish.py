"""Publishing: turns a writer's request and its written bytes into an object. DoPut and the put in place share this
code.

The node hashes the bytes in the arena when their writer reports that they are written, before any reader can see them.
The digest names a source, and is the version of a plain object. If a writer asks for no hashing, its object gets a
random version.
"""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from blake3 import blake3

from dataplane.core.digests import content_digest, digest_of, source_name, version_of
from dataplane.core.errors import BadRequestError, ChecksumError
from dataplane.core.refs import Lineage, Ref
from dataplane.core.schemas import check_array
from dataplane.server.put_request import PutRequest
from dataplane.storage.disk_files import DiskFile
from dataplane.storage.entries import Entry, Slab
from dataplane.storage.store import INTERNAL_SESSION, Store


def seal(store: Store, slab: Slab, request: PutRequest, dtype: str, node_id: str) -> Ref:
    """Check a written slab and publish it as an object. If that fails, the slab is given back.

    If the name has the same bytes already, the existing object is returned; other bytes are refused.
    """
    return seal_all(store, [slab], [request], dtype, node_id, Digests(store, [slab]))[0]


class Digests:
    """The digests of slabs. If the writer reports its progress, they are computed while it writes."""

    def __init__(self, store: Store, slabs: Sequence[Slab]) -> None:
        self._store = store
        self._slabs = slabs
        self._done: list[str] = []
        self._hash: blake3 | None = None
        """The hash of the slab that is being written."""
        self._at = 0
        """The number of hashed bytes, over all slabs in their order."""
        self._start = 0
        """The offset, over all slabs, at which the present slab begins."""

    def hash_until(self, nbytes: int) -> None:
        """Hash the bytes that are written by now: the first `nbytes`, counted over all slabs in their order."""
        total = sum(slab.nbytes for slab in self._slabs)
        if not self._at <= nbytes <= total:
            raise BadRequestError(f"put.written is {nbytes} after {self._at}; wanted no less, and at most {total}")
        while self._at < nbytes:
            slab = self._slabs[len(self._done)]
            end = min(slab.nbytes, nbytes - self._start)
            if self._at == self._start and end == slab.nbytes:
                self._finish(slab, content_digest(self._store.view(slab)))
                continue
            self._hash = self._hash or blake3(max_threads=blake3.AUTO)
            self._hash.update(self._store.view(slab)[self._at - self._start : end].data)
            self._at = self._start + end
            if end == slab.nbytes:
                self._finish(slab, digest_of(self._hash))

    def take(self, number: int) -> str:
        """Return the digest of a slab."""
        if number < len(self._done):
            return self._done[number]
        return content_digest(self._store.view(self._slabs[number]))

    def _finish(self, slab: Slab, digest: str) -> None:
        self._done.append(digest)
        self._start += slab.nbytes
        self._at, self._hash = self._start, None


def seal_all(
    store: Store,
    slabs: Sequence[Slab],
    requests: Sequence[PutRequest],
    dtype: str,
    node_id: str,
    digests: Digests,
) -> list[Ref]:
    """Publish many slabs like `seal`. If one of them is refused, nothing is published.

    In two cases a part of them may be published: a disk becomes full, or another client takes a name at this moment.
    """
    remaining = deque(slabs)
    try:
        described = [
            _ref(slab, request, request.dtype or dtype, node_id, partial(digests.take, at))
            for at, (slab, request) in enumerate(zip(slabs, requests, strict=True))
        ]
        if len(slabs) > 1:
            _check_names(store, slabs, described)
        sealed: list[Entry | None] = [None] * len(slabs)
        if not any(request.is_durable for request in requests):
            sealed = store.seal_all_new(slabs, described)
            remaining = deque(slab for slab, entry in zip(slabs, sealed, strict=True) if entry is None)
        refs = []
        for slab, request, (ref, digest), entry in zip(slabs, requests, described, sealed, strict=True):
            if entry is not None:
                refs.append(entry.ref)
                continue
            refs.append(_publish(store, slab, ref, digest, is_durable=request.is_durable))
            remaining.popleft()
        return refs
    except BaseException:
        for slab in remaining:
            store.abort(slab)
        raise


def _check_names(store: Store, slabs: Sequence[Slab], described: Sequence[tuple[Ref, str]]) -> None:
    """Check that every name is free, or has this same content. Raises BadRequestError if a name has other content, or
    occurs here twice with different content."""
    first: dict[str, tuple[Slab, Ref]] = {}
    taken = store.find_all([ref.name for ref, _ in described])
    for slab, (ref, digest), entry in zip(slabs, described, taken, strict=True):
        before, there = first.setdefault(ref.name, (slab, ref))
        is_same = (there.dtype, there.shape) == (ref.dtype, ref.shape)
        if before is not slab and not (is_same and np.array_equal(store.view(before), store.view(slab))):
            raise BadRequestError(f"plain object {ref.name!r} comes twice in one put, with two contents; name it once")
        if entry is not None:
            _same(store, slab, ref, digest)


def _publish(store: Store, slab: Slab, ref: Ref, digest: str, *, is_durable: bool) -> Ref:
    """Return the ref of the object that has the name after this call. A durable object is on the disk, under that ref,
    before this returns."""
    there = _same(store, slab, ref, digest) if is_durable else None
    while True:
        if is_durable:
            done = _publish_durable(store, slab, ref, digest, there)
        else:
            done = _publish_once(store, slab, ref, digest, there, None)
        if done is not None:
            return done.ref
        there = _same(store, slab, ref, digest)


def _publish_once(
    store: Store, slab: Slab, ref: Ref, digest: str, there: Entry | None, file: DiskFile | None
) -> Entry | None:
    """Publish a slab under the name, or join the existing object. Return None if the existing object changed
    meanwhile."""
    if there is None:
        return store.seal_new(slab, ref, digest, file)
    return there if store.seal_again(slab, there, digest, file) else None


def _publish_durable(store: Store, slab: Slab, ref: Ref, digest: str, there: Entry | None) -> Entry | None:
    """Publish like `_publish_once`, with a new file or the existing object's file. An unused file is removed."""
    if there is not None and there.is_durable:
        store.disk.keep([there], slab.scope)
        try:
            return _publish_once(store, slab, ref, digest, there, None)
        finally:
            store.disk.unmark([there], slab.scope)
    file = store.disk.write_durable(slab, store.view(slab), ref if there is None else there.ref, digest)
    done = None
    try:
        done = _publish_once(store, slab, ref, digest, there, file)
    finally:
        if done is None:
            store.disk.discard(slab, file)
    return done


def _ref(slab: Slab, request: PutRequest, dtype: str, node_id: str, hashed: Callable[[], str]) -> tuple[Ref, str]:
    """Return the ref of the slab's bytes, and their digest; the digest is empty if they are not hashed."""
    shape = check_array(dtype, request.shape, slab.nbytes)
    is_source = request.kind == "source"
    is_hashed = request.is_hashed or request.is_durable or is_source or bool(request.checksum)
    digest = hashed() if is_hashed else ""
    if request.checksum and digest != request.checksum:
        raise ChecksumError(
            f"{request.name or 'the source'} arrived with checksum {digest}; sent was {request.checksum}"
        )
    lineage = None
    if is_source:
        lineage = Lineage(dataset="", shard="", offset=0, nbytes=slab.nbytes, source=digest, recipe=None)
    ref = Ref(
        name=source_name(digest) if is_source else request.name,
        kind=request.kind,
        dtype=dtype,
        shape=shape,
        nbytes=slab.nbytes,
        node=node_id,
        lineage=lineage,
        meta=request.meta,
        version=0 if is_source else version_of(digest) if digest else secrets.randbits(63) or 1,
    )
    return ref, digest


def _same(store: Store, slab: Slab, ref: Ref, digest: str) -> Entry | None:
    """Return the object that has the name, or None if it was just released. BadRequestError if its content is
    different."""
    leased = store.lease_one(ref.name)
    if leased is None:
        return None
    there = leased.entry
    try:
        is_same = (there.ref.dtype, there.ref.shape) == (ref.dtype, ref.shape) and (
            there.digest == digest
            if there.digest and digest
            else np.array_equal(store.content(there), store.view(slab))
        )
    finally:
        store.end_leases([leased.lease], INTERNAL_SESSION)
    if not is_same:
        raise BadRequestError(
            f"plain object {ref.name!r} exists with other content ({there.ref.nbytes} bytes, {there.ref.dtype} "
            f"{list(there.ref.shape)}); objects are immutable: release it first, or choose another name"
        )
    return there
