"""Publishing: turns a writer's request and its written bytes into an object. DoPut and the put in place share this
code.

The node hashes the bytes in the arena when their writer reports that they are written, before any reader can see them.
The digest names a source, and is the version of a plain object. If a writer asks for no hashing, its object gets a
random version.
"""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from blake3 import blake3

from dataplane.core.arrays import check_array
from dataplane.core.digests import content_digest, digest_of, source_name, version_of
from dataplane.core.errors import BadRequestError, ChecksumError
from dataplane.core.refs import Lineage, Ref
from dataplane.server.put_request import PutRequest
from dataplane.storage.entries import Entry, Slab, Written
from dataplane.storage.store import INTERNAL_SESSION, Store


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


def publish_puts(
    store: Store,
    slabs: Sequence[Slab],
    requests: Sequence[PutRequest],
    dtype: str,
    node_id: str,
    digests: Digests | None = None,
) -> list[Ref]:
    """Check written slabs, publish them as objects, and return their refs. `dtype` is for requests without one.

    If a name has the same bytes already, the existing object is returned; other bytes are refused. If one of the slabs
    is refused, nothing is published and all slabs are given back. In two cases a part of them may be published: a disk
    becomes full, or another client takes a name at this moment.
    """
    digests = digests or Digests(store, slabs)
    remaining = deque(slabs)
    try:
        written = [
            _described(slab, request, request.dtype or dtype, node_id, partial(digests.take, at))
            for at, (slab, request) in enumerate(zip(slabs, requests, strict=True))
        ]
        if len(slabs) > 1:
            _check_names(store, written)
        published: list[Entry | None] = [None] * len(slabs)
        if not any(request.is_durable for request in requests):
            published = store.publish_new(written)
            remaining = deque(slab for slab, entry in zip(slabs, published, strict=True) if entry is None)
        refs = []
        for item, request, entry in zip(written, requests, published, strict=True):
            if entry is not None:
                refs.append(entry.ref)
                continue
            refs.append(_publish(store, item, request))
            remaining.popleft()
        return refs
    except BaseException:
        for slab in remaining:
            store.abort(slab)
        raise


def _check_names(store: Store, written: Sequence[Written]) -> None:
    """Check that every name is free, or has this same content. Raises BadRequestError if a name has other content, or
    occurs here twice with different content."""
    first: dict[str, Written] = {}
    taken = store.find_all([item.ref.name for item in written])
    for item, entry in zip(written, taken, strict=True):
        before = first.setdefault(item.ref.name, item)
        is_same = (before.ref.dtype, before.ref.shape) == (item.ref.dtype, item.ref.shape)
        if before is not item and not (is_same and np.array_equal(store.view(before.slab), store.view(item.slab))):
            raise BadRequestError(
                f"plain object {item.ref.name!r} comes twice in one put, with two contents; name it once"
            )
        if entry is not None:
            _same(store, item)


def _publish(store: Store, item: Written, request: PutRequest) -> Ref:
    """Return the ref of the object that has the name after this call. A durable object is on the disk, under that ref,
    before this returns."""
    there = _same(store, item) if request.is_durable else None
    while True:
        if request.is_durable:
            done = _publish_durable(store, item, there, is_synced=request.is_synced)
        else:
            done = _publish_once(store, item, there)
        if done is not None:
            return done.ref
        there = _same(store, item)


def _publish_once(store: Store, item: Written, there: Entry | None) -> Entry | None:
    """Publish a slab under the name, or join the existing object. Return None if the existing object changed
    meanwhile."""
    if there is None:
        return store.publish_new([item])[0]
    return there if store.merge(item, there) else None


def _publish_durable(store: Store, item: Written, there: Entry | None, *, is_synced: bool) -> Entry | None:
    """Publish like `_publish_once`, with a new file or the existing object's file. An unused file is removed."""
    slab = item.slab
    if there is not None and there.is_durable:
        store.disk.keep([there], slab.scope)
        try:
            if is_synced:
                store.disk.sync(there)
            return _publish_once(store, item, there)
        finally:
            store.disk.unmark([there], slab.scope)
    ref = item.ref if there is None else there.ref
    file = store.disk.write_durable(slab, store.view(slab), ref, item.digest, is_synced=is_synced)
    done = None
    try:
        done = _publish_once(store, replace(item, file=file), there)
    finally:
        if done is None:
            store.disk.discard(slab, file)
    return done


def _described(slab: Slab, request: PutRequest, dtype: str, node_id: str, hashed: Callable[[], str]) -> Written:
    """Return the slab with the ref of its bytes, and their digest; the digest is empty if they are not hashed."""
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
    return Written(slab, ref, digest, is_held=True)


def _same(store: Store, item: Written) -> Entry | None:
    """Return the object that has the name, or None if it was just released. BadRequestError if its content is
    different."""
    ref, leased = item.ref, store.lease_one(item.ref.name)
    if leased is None:
        return None
    there = leased.entry
    try:
        is_same = (there.ref.dtype, there.ref.shape) == (ref.dtype, ref.shape) and (
            there.digest == item.digest
            if there.digest and item.digest
            else there.digest == content_digest(store.view(item.slab))
            if there.slab is None
            else np.array_equal(store.content(there), store.view(item.slab))
        )
    finally:
        store.end_leases([leased.lease], INTERNAL_SESSION)
    if not is_same:
        raise BadRequestError(
            f"plain object {ref.name!r} exists with other content ({there.ref.nbytes} bytes, {there.ref.dtype} "
            f"{list(there.ref.shape)}); objects are immutable: release it first, or choose another name"
        )
    return there
