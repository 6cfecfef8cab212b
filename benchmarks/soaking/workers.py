"""The writers and readers of the soak, each in a process of its own that may be killed at any moment.

They report to their parent over a pipe. A writer reports each put and each release before it begins, so that the parent
can judge what a reader misses. Every object's digest is in its ref.
"""

import faulthandler
import random
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest, source_name
from dataplane.core.errors import MissingObjectError, NodeUnavailableError, OutOfSpaceError
from dataplane.core.refs import Ref
from tests.dataplane.shards import RECIPE

TIMEOUT_S = 60.0
HANG_S = 80.0
"""The time in seconds within which every operation must end; otherwise the stacks are printed."""
MAX_OWN_BYTES = 6 << 20
"""The number of bytes that a writer keeps before it releases its oldest object."""
MAX_HELD_BYTES = 4 << 20
"""The number of bytes of which a reader keeps views."""
MAX_PUT_BYTES = 2 << 20
DERIVE_AT_ONCE = 4
SOAK_RECIPE = dict(RECIPE)

T = TypeVar("T")


class Writer:
    """Puts, derives, opens and closes scopes, and releases, until it is told to stop, or killed."""

    def __init__(self, name: str, uri: str, pipe: Connection, num_samples: int) -> None:
        self._name = name
        self._pipe = pipe
        self._rng = random.Random(name)
        self._bytes = np.random.default_rng(self._rng.getrandbits(64))
        self._num_samples = num_samples
        self._client = first_contact(uri)
        self._own: deque[Ref] = deque()
        self._count = 0

    def run(self) -> None:
        """Work until the parent tells it to stop."""
        works: tuple[Callable[[], None], ...] = (self._put, self._put_source, self._derive, self._scope)
        while not self._pipe.poll():
            faulthandler.dump_traceback_later(HANG_S)
            try:
                self._rng.choices(works, (10, 2, 5, 1))[0]()
                self._release()
            except OutOfSpaceError:
                self._say("count", {"num_full": 1})
                self._release(everything=True)
        self._client.close()  # what it put stays, for the parent to check and to release

    def _payload(self) -> np.ndarray:
        size = int(np.exp(self._rng.uniform(np.log(100), np.log(MAX_PUT_BYTES))))
        return self._bytes.integers(0, 256, size, dtype=np.uint8)

    def _put(self, scope: str | None = None) -> Ref:
        self._count += 1
        name, data = f"soak/{self._name}/{self._count}", self._payload()
        is_durable = scope is None and self._rng.random() < 0.2
        self._say("will", name)
        started = time.monotonic()
        meta = {"checksum": content_digest(data)}
        ref = self._client.put(data, name=name, meta=meta, scope=scope, durable=is_durable)
        self._announce(ref, started, is_durable, scope)
        if scope is None:
            self._own.append(ref)
        return ref

    def _put_source(self) -> None:
        data = self._payload()[:100_000].tobytes()
        self._say("will", source_name(content_digest(data)))
        started = time.monotonic()
        ref = self._client.put_source(data, {"checksum": content_digest(data)})
        self._announce(ref, started, False, None)
        self._own.append(ref)

    def _derive(self) -> None:
        indices = [self._rng.randrange(self._num_samples) for _ in range(DERIVE_AT_ONCE)]
        sources = [sample.media[0] for sample in self._client.samples("soak", indices)]
        for made in self._client.derive(sources, SOAK_RECIPE):
            assert isinstance(made, Ref), made
            self._say("count", {"num_derived": 1})
            self._say("made", made.to_dict())

    def _scope(self) -> None:
        self._count += 1
        name = f"scope/{self._name}/{self._count}"
        self._say("scope", name)
        self._client.open_scope(name, quota_bytes=4 * MAX_PUT_BYTES)
        refs = [self._put(name) for _ in range(self._rng.randrange(1, 4))]
        self._say("gone", [ref.name for ref in refs])
        self._client.close_scope(name)
        self._say("count", {"num_scopes": 1})

    def _release(self, *, everything: bool = False) -> None:
        """Release the oldest of its own objects."""
        kept = 0 if everything else MAX_OWN_BYTES
        going: list[Ref] = []
        while self._own and sum(ref.nbytes for ref in self._own) > kept:
            going.append(self._own.popleft())
        if going:
            self._say("gone", [ref.name for ref in going])
            self._client.release(going)
            self._say("count", {"num_releases": len(going)})

    def _announce(self, ref: Ref, started: float, is_durable: bool, scope: str | None) -> None:
        self._say("put", {"ref": ref.to_dict(), "started": started, "is_durable": is_durable, "scope": scope})
        self._say("count", {"num_puts": 1, "put_bytes": ref.nbytes, "num_durable": int(is_durable)})

    def _say(self, kind: str, value: Any) -> None:
        self._pipe.send((kind, value))


class Watcher:
    """Resolves the objects that the parent names. It checks every view when it is made, and again just before it is
    dropped."""

    def __init__(self, name: str, uri: str, pipe: Connection) -> None:
        self._pipe = pipe
        self._rng = random.Random(name)
        self._client = first_contact(uri)
        self._reader = _until_it_answers(lambda: Reader(uri, timeout_s=TIMEOUT_S))
        self._held: list[tuple[float, Ref, np.ndarray]] = []

    def run(self) -> None:
        """Request, resolve, check, keep and check again, until the parent says stop."""
        while True:
            faulthandler.dump_traceback_later(HANG_S)
            self._pipe.send(("want", self._rng.choice((1, 2, 4, 8))))
            answer = self._pipe.recv()
            if answer is None:
                break
            self._look([Ref.from_dict(item) for item in answer])
            self._drop(time.monotonic())
        self._drop(float("inf"))
        self._reader.close()
        self._client.close()

    def _look(self, refs: list[Ref]) -> None:
        if refs and self._rng.random() < 0.05:
            self._get(refs[0])
        for group in self._resolved(refs):
            for ref, view in group:
                self._check(ref, view, "when it came")
                self._held.append((time.monotonic() + self._rng.expovariate(0.3), ref, view))
        while sum(ref.nbytes for _, ref, _ in self._held) > MAX_HELD_BYTES:
            self._drop_one(self._rng.randrange(len(self._held)))

    def _resolved(self, refs: list[Ref]) -> list[list[tuple[Ref, np.ndarray]]]:
        """Return the refs and views of all objects, resolved in one call. If one is missing, resolve them one by one to
        find out which."""
        try:
            views = self._reader.resolve(refs)
        except MissingObjectError as error:
            if len(refs) > 1:
                return [group for ref in refs for group in self._resolved([ref])]
            self._pipe.send(("missing", {"name": refs[0].name, "at": time.monotonic(), "text": str(error)}))
            return []
        except OutOfSpaceError:
            self._pipe.send(("count", {"num_full": 1}))
            self._drop(float("inf"))
            return []
        self._pipe.send(("count", {"num_resolves": 1, "num_views": len(refs)}))
        return [list(zip(refs, views, strict=True))]

    def _get(self, ref: Ref) -> None:
        """Fetch the bytes of an object over DoGet."""
        try:
            data = self._client.get(ref)
        except MissingObjectError as error:
            self._pipe.send(("missing", {"name": ref.name, "at": time.monotonic(), "text": str(error)}))
            return
        except OutOfSpaceError:
            return
        self._pipe.send(("count", {"num_gets": 1}))
        self._check(ref, np.frombuffer(data, np.uint8), "over DoGet")

    def _check(self, ref: Ref, view: np.ndarray, when: str) -> None:
        found = content_digest(np.ascontiguousarray(view).reshape(-1).view(np.uint8).data)
        self._pipe.send(("count", {"num_checks": 1, "checked_bytes": ref.nbytes}))
        if found != ref.meta["checksum"]:
            self._pipe.send(("wrong", f"{ref.name}: {found} instead of {ref.meta['checksum']} {when}"))

    def _drop(self, now: float) -> None:
        for at in reversed(range(len(self._held))):
            if self._held[at][0] <= now:
                self._drop_one(at)

    def _drop_one(self, at: int) -> None:
        _, ref, view = self._held.pop(at)
        self._check(ref, view, "just before it was dropped")


def first_contact(uri: str) -> Client:
    """Return a client that reached the node. The first call does not wait for a node that was just killed; later calls
    do."""
    client = Client(uri, timeout_s=TIMEOUT_S)
    _until_it_answers(client.stat)
    return client


def _until_it_answers(call: Callable[[], T]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return call()
        except NodeUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def run_worker(role: str, name: str, uri: str, pipe: Connection, num_samples: int) -> None:
    """Run a worker process."""
    faulthandler.enable()
    try:
        if role == "writer":
            Writer(name, uri, pipe, num_samples).run()
        else:
            Watcher(name, uri, pipe).run()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:
        pipe.send(("wrong", f"{role} {name} failed: {type(error).__name__}: {error}"))
        raise
    pipe.send(("done", name))
