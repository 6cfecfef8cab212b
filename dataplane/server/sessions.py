"""The sessions of clients that use the node's memory: what each of them keeps, and when a session ends.

A *present* client holds a lock on its session's file (`dataplane/core/presence.py`). Its leases and its unsealed slabs
stay until it gives them back, or until its lock is free, which means that its process has ended. So they outlive a
connection that breaks. Clients without a lock are on other machines and map no memory: their session ends with its
stream.
"""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dataplane.core.errors import BadRequestError, NodeUnavailableError, SessionLostError
from dataplane.core.json_body import take, take_list
from dataplane.core.units import format_bytes
from dataplane.storage.arena import Segment
from dataplane.storage.presence_file import PresenceFile
from dataplane.storage.store import Store

Kind = Literal["reader", "writer"]

STILL_S = 10.0
"""The seconds without a word after which a client stands still. Clients say every few seconds that they are there."""
MAX_TOLD = 5
"""How many clients that stand still an error names, those with most memory first."""
_AWAY_S = 0.1
"""The seconds between two looks at the locks of clients without a connection."""
_CONNECTED_S = 1.0
"""The seconds between two looks at all locks: a forked child may keep the connection of a client that has ended."""

log = logging.getLogger(__name__)


class Places(Protocol):
    """The unsealed slabs of one stream."""

    @property
    def held_bytes(self) -> int:
        """The bytes of the slabs."""

    def give_back(self) -> None:
        """Give the slabs back to the arena. Thread-safe, and safe to call twice."""


@dataclass(slots=True, eq=False)
class Session:
    """One session of one client."""

    token: str
    kind: Kind
    file: PresenceFile | None
    """The file for the client's lock; None for a client on another machine."""
    is_present: bool = False
    """True once the node has seen the lock."""
    is_open: bool = True
    pid: int = 0
    """The client's process id, as the client knows it."""
    num_streams: int = 1
    heard_at: float = field(default_factory=time.monotonic)
    """When the client last said something, in seconds of the monotonic clock."""
    unheard: dict[int, int] = field(default_factory=dict)
    """Streams that the client gave up, and that have not ended here yet: how many replies it got over each."""
    leases: dict[int, tuple[int, Sequence[int]]] = field(default_factory=dict)
    """The number and the leases of the last reply of each stream that broke. The client says how many it got."""
    places: dict[int, Places] = field(default_factory=dict)
    """The slabs of each `put` stream that is open, or that broke."""
    broken: set[int] = field(default_factory=set)
    """The `put` streams that broke."""


class Sessions:
    """All sessions of a node. Thread-safe."""

    def __init__(self, store: Store, segment: Segment) -> None:
        self._store = store
        self._segment = segment
        self._lock = threading.RLock()
        self._open: dict[str, Session] = {}
        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sessions", daemon=True)
        self._watcher.start()
        store.tell_of_keepers(self.describe_standing_still)

    # -- coming and going ------------------------------------------------------------------------------------------

    def open(self, kind: Kind, *, is_local: bool) -> Session:
        """Begin a session, whose stream is open."""
        with self._lock:
            if self._is_stopping.is_set():
                raise NodeUnavailableError("this node is stopping")
            file = PresenceFile(self._segment) if is_local else None
            session = Session(secrets.token_hex(16), kind, file)
            self._open[session.token] = session
        if kind == "reader":
            self._store.open_session(session.token)
        return session

    def attach(self, token: str) -> Session | None:
        """Note that another stream of a session is open, and return the session; None if the session is not open."""
        with self._lock:
            session = self._open.get(token)
            if session is not None:
                session.num_streams += 1
                session.heard_at = time.monotonic()
            return session

    def detach(self, session: Session, *, is_final: bool) -> None:
        """Note that a stream of a session ended. The session ends too if `is_final`, or if no lock shows that its
        client is alive."""
        with self._lock:
            session.num_streams -= 1
            if not is_final and (session.num_streams or session.is_present):
                return
        self._end(session)

    def answer(self, session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a message of the session's stream says, and return the reply."""
        session.heard_at = time.monotonic()
        if "present" in request:
            self._see(session, take(take(request, "session", "present", dict), "session.present", "pid", int))
        leases = take_list(request, "session", "ended", int, default=[])
        unheard = take_list(request, "session", "unheard", int, default=[])
        heard = take_list(request, "session", "heard", int, default=[])
        if len(heard) != len(unheard):
            raise BadRequestError(
                f"session.heard has {len(heard)} numbers; wanted one for each of {len(unheard)} streams"
            )
        if leases and session.kind == "reader":
            self._store.end_leases(leases, session.token)
        for stream, num_heard in zip(unheard, heard, strict=True):
            self._end_unheard(session, stream, num_heard)
        return {"is_open": session.is_open}

    def close(self) -> None:
        """Stop looking at locks, and remove the files that still have a name. No session begins any more."""
        self._is_stopping.set()
        self._watcher.join(5)
        with self._lock:
            for session in self._open.values():
                if session.file is not None:
                    session.file.hide()

    # -- streams of a session --------------------------------------------------------------------------------------

    def find(self, token: str) -> Session:
        """Return the open session of this token. Raises SessionLostError if there is none."""
        with self._lock:
            session = self._open.get(token)
        if session is None:
            raise SessionLostError(
                f"session {token[:40]!r} is not open on this node: the node restarted, or the session has ended"
            )
        return session

    def break_off(self, token: str, stream: int, num_replies: int, leases: Sequence[int]) -> None:
        """Note that a resolve stream broke, and that the last of its replies, with these leases, may not have arrived.

        A present client says how many replies arrived. Without a lock no client will say it, so the leases end.
        """
        with self._lock:
            session = self._open.get(token)
            if session is not None and session.is_present:
                num_heard = session.unheard.pop(stream, None)
                if num_heard is None and leases:
                    session.leases[stream] = num_replies, leases
                if num_heard is None or num_heard >= num_replies:
                    return
        self._store.end_leases(leases, token)

    def enter(self, session: Session, stream: int, places: Places) -> None:
        """Note that a `put` stream of a session is open, and which slabs it has."""
        with self._lock:
            session.places[stream] = places

    def leave(self, session: Session, stream: int) -> None:
        """Note that a `put` stream ended. Its client may still write into its slabs: they stay until the client says
        that it does not."""
        with self._lock:
            places = session.places[stream]
            if session.is_open and session.is_present and places.held_bytes and stream not in session.unheard:
                session.broken.add(stream)
                return
            session.unheard.pop(stream, None)
            del session.places[stream]
        places.give_back()

    # -- what is seen ----------------------------------------------------------------------------------------------

    def stat(self) -> dict[str, Any]:
        """Return who keeps memory while standing still: the process, since when, and how many bytes."""
        now = time.monotonic()
        with self._lock:
            still = [one for one in self._open.values() if one.is_present and now - one.heard_at > STILL_S]
        found = [
            {"kind": one.kind, "pid": self._pid(one), "still_s": round(now - one.heard_at, 1), "held_bytes": held}
            for one in still
            if (held := self._held_bytes(one))
        ]
        return {
            "num_standing_still": len(found),
            "still_bytes": sum(one["held_bytes"] for one in found),
            "standing_still": sorted(found, key=lambda one: -one["held_bytes"]),
        }

    def describe_standing_still(self) -> str:
        """Return who keeps memory while standing still, for an error; an empty text if no client does."""
        found = self.stat()["standing_still"]
        if not found:
            return ""
        told = ", ".join(
            f"the {one['kind']} {one['pid']} ({format_bytes(one['held_bytes'])}, for {one['still_s']:.0f} s)"
            for one in found[:MAX_TOLD]
        )
        more = f" and {len(found) - MAX_TOLD} more, see stat" if len(found) > MAX_TOLD else ""
        return f"clients keep memory while they stand still: {told}{more}; let these processes go on, or end them"

    def _held_bytes(self, session: Session) -> int:
        with self._lock:
            places = list(session.places.values())
        return self._store.leased_bytes_of(session.token) + sum(one.held_bytes for one in places)

    # -- private ---------------------------------------------------------------------------------------------------

    def _see(self, session: Session, pid: int) -> None:
        """Look at the lock of a client that says that it holds it."""
        try:
            holder = self._holder(session)
        except OSError as error:
            raise BadRequestError(f"session.present: this system cannot tell who holds a lock ({error})") from error
        if session.file is None or holder is None:
            raise BadRequestError("session.present: the lock of this session is free; wanted its client to hold it")
        session.file.hide()
        session.pid = pid
        session.is_present = True

    def _end_unheard(self, session: Session, stream: int, num_heard: int) -> None:
        """Take back what a stream gave that the client gave up: its slabs, and the leases of a reply that the client
        did not get."""
        with self._lock:
            last = session.leases.pop(stream, None)
            places = session.places.get(stream)
            if stream in session.broken:
                session.broken.discard(stream)
                del session.places[stream]
            elif last is None:
                session.unheard[stream] = num_heard
        if places is not None:
            places.give_back()
        if last is not None and last[0] > num_heard:
            self._store.end_leases(last[1], session.token)

    def _end(self, session: Session) -> None:
        """End a session, and take back all that it still has."""
        with self._lock:
            if not session.is_open:
                return
            session.is_open = False
            del self._open[session.token]
            places = list(session.places.values())
            if session.file is not None:
                session.file.close()
        for one in places:
            one.give_back()
        if session.kind == "reader":
            self._store.end_session(session.token)

    def _watch(self) -> None:
        """End the sessions whose locks are free, until the node stops."""
        next_all = 0.0
        while not self._is_stopping.wait(_AWAY_S):
            now = time.monotonic()
            is_all = now >= next_all
            if is_all:
                next_all = now + _CONNECTED_S
            with self._lock:
                seen = [one for one in self._open.values() if one.is_present and (is_all or not one.num_streams)]
            for session in seen:
                try:
                    if self._holder(session) is None:
                        log.info("the %s %d has ended", session.kind, session.pid)
                        self._end(session)
                except Exception:  # this thread must live: it ends all later sessions too
                    log.exception("the lock of the %s %d could not be looked at", session.kind, session.pid)

    def _pid(self, session: Session) -> int:
        """Return the id of a client's process as this node sees it, or, in another container, as the client knows
        it."""
        return self._holder(session) or session.pid

    def _holder(self, session: Session) -> int | None:
        """Return which process holds the lock of a session, 0 if it cannot be seen; None if it has ended."""
        with self._lock:
            return session.file.holder() if session.is_open and session.file is not None else None
