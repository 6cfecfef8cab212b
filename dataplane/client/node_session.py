"""The session of a client that uses a node's memory. It lasts as long as the process needs it, whatever happens to its
connection.

The client holds a lock that the kernel drops when the process ends (`dataplane/core/presence.py`). While the lock is
held, the node keeps what it gave to the session: leases of a reader, slabs of a writer. A connection that breaks is
opened again, and what the node did not hear is said again. The session is lost only if the node does not know it: a new
node has started, or the lock was dropped by mistake.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Literal

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials, connect
from dataplane.client.session_stream import SessionStream
from dataplane.core.errors import (
    BadRequestError,
    DataPlaneError,
    NodeUnavailableError,
    SessionLostError,
)
from dataplane.core.hosts import default_host_id
from dataplane.core.json_body import dump, take
from dataplane.core.presence import Presence

TICK_S = 1.0
"""The maximum number of seconds between two looks at what there is to tell the node."""
BEAT_S = 4.0
"""The seconds after which the session tells the node that this process is there, if it told nothing else."""
_GATHER_S = 0.01
"""The seconds during which ended leases are collected, so that one message to the node returns many of them."""
_MAX_RELEASES = 8192
"""The maximum number of ended leases in one message."""
_WAKE = 0
"""What is put into `ended` to wake the session's thread. No lease has this number."""

log = logging.getLogger(__name__)


class NodeSession:
    """A session with one node. Thread-safe, but it does not survive a fork.

    Consumes: `ended`, the lease numbers from finalisers of views; None means: close after the last lease.
    """

    def __init__(
        self,
        uri: str,
        kind: Literal["reader", "writer"],
        timeout_s: float,
        credentials: Credentials | None = None,
        open_s: float | None = None,
        flight: fl.FlightClient | None = None,
    ) -> None:
        """Open a session with the node at `uri`, over its own connection unless there is a `flight`. `timeout_s` is the
        timeout of each message; `open_s`, if given, replaces it for the first."""
        self.uri = uri
        self.kind = kind
        self.timeout_s = timeout_s
        self.ended: SimpleQueue[int | None] = SimpleQueue()
        self.is_lost = False
        """True if the node is gone or does not know this session any more."""
        self.on_same_node_lost: Callable[[], None] = lambda: None
        """What to do if a node that still runs does not know this session any more: it may reuse the memory."""
        self.on_end: Callable[[], None] = lambda: None
        """What to do when the session's thread ends."""
        self._credentials = credentials
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._num_leases = 0
        self._num_in_flight = 0
        self._is_closing = False
        self._told = threading.Event()
        """The event that is set once the node knows all that ended before `close`, or once this session's thread has
        ended."""
        self._unsaid: list[int] = []
        """Leases that ended, and that the node has not confirmed yet."""
        self._unheard: list[tuple[int, int]] = []
        """Streams that this process gave up, with the number of replies that it got over each, and that the node has
        not confirmed yet."""
        self._is_detached = False
        self._own_flight = connect(uri, credentials) if flight is None else None
        self.flight: fl.FlightClient = self._own_flight if flight is None else flight
        self._stream = SessionStream(self.flight, uri, {"kind": kind, "host": default_host_id()}, open_s or timeout_s)
        self.hello = self._stream.hello
        """The first message of the node: its id, its incarnation, and where its memory is."""
        self.token = str(self.hello["session"])
        self.incarnation = str(self.hello["incarnation"])
        """The id of this run of the node's process. After a restart the node has another id and other memory."""
        self._presence = self._appear(open_s or timeout_s)
        self._next_beat = time.monotonic() + BEAT_S
        self._thread = threading.Thread(target=self._keep, name="leases", daemon=True)
        self._thread.start()

    @property
    def is_present(self) -> bool:
        """True if the node has seen this process's lock, so that the process may use the node's memory."""
        return self._presence is not None

    def check_usable(self) -> None:
        """Raise an error if this session cannot be used: it is lost or closed, or it was made before a fork."""
        if os.getpid() != self._pid:
            raise NodeUnavailableError(f"this {self.kind} was made in process {self._pid}; make one after the fork")
        if self.is_lost:
            raise SessionLostError(f"the node at {self.uri} restarted, or lost this {self.kind}: make a new one")
        if self._is_closing:
            raise NodeUnavailableError(f"this {self.kind} of {self.uri} is closed; make a new one")

    def begin(self) -> None:
        """Begin a call: the session stays open until `finish`. Raises an error if the session cannot be used."""
        with self._lock:
            self.check_usable()
            self._num_in_flight += 1

    def finish(self) -> None:
        """End a call. Call this after `add_leases` for the leases that the node granted to the call."""
        with self._lock:
            self._num_in_flight -= 1

    def add_leases(self, number: int) -> None:
        """Count leases that the node granted. The number of each lease is put into the queue `ended` when its view is
        gone."""
        with self._lock:
            self._num_leases += number

    @property
    def has_views(self) -> bool:
        """True if views of this lost session may still be alive."""
        self._told.wait(2 * TICK_S)  # the session's thread may still be counting ended leases
        with self._lock:
            with suppress(Empty):
                while True:  # never wait: the session's thread takes from it too
                    self._num_leases -= bool(self.ended.get_nowait())
            return self._num_leases > 0

    def open_stream(self, verb: str) -> tuple[int, fl.FlightStreamWriter, fl.FlightStreamReader]:
        """Open a stream of this session, and return its number and both of its ends."""
        number = next(self._numbers)
        descriptor = dump({"verb": verb, "session": self.token, "stream": number})
        return number, *self.flight.do_exchange(fl.FlightDescriptor.for_command(descriptor))

    def drop_stream(self, number: int, num_heard: int) -> None:
        """Tell the node that this process gave a stream up after `num_heard` replies: it uses none of its slabs, and
        got no leases after those replies."""
        with self._lock:
            self._unheard.append((number, num_heard))
        self.ended.put(_WAKE)

    def lose(self) -> None:
        """Mark the session as lost, because the node does not know it.

        The leases do not count any more, and the session's thread ends. The lock is held until this object is gone.
        """
        self.is_lost = True
        self.ended.put(_WAKE)

    def close(self) -> None:
        """End the session as soon as no view is left; at once if there is none.

        The call waits at most two seconds until the node knows the leases that ended before this call.
        """
        with self._lock:
            self._is_closing = True
        self.ended.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._told.wait(2 * TICK_S)

    # -- private ---------------------------------------------------------------------------------------------------

    def _appear(self, timeout_s: float) -> Presence | None:
        """Take the lock of this session, and show it to the node. Return None if the node's memory cannot be used from
        here."""
        if self.hello["host"] != default_host_id():
            log.info("the node at %s runs on another machine; its memory is not used", self.uri)
            return None
        try:
            presence = Presence(self.hello.get("presence") or {"path": ""})
        except OSError as error:
            log.warning("the memory of %s cannot be used (%s); objects are copied over Flight", self.uri, error)
            return None
        try:
            self._stream.ask({"present": {"pid": self._pid}}, timeout_s)
        except BadRequestError as error:
            log.warning(
                "the node at %s does not see this process (%s); objects are copied over Flight", self.uri, error
            )
            presence.release()
            return None
        return presence

    # -- private: the session's thread -----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Tell the node what ended and that this process is there, until the session is lost, or is closed and has no
        leases.

        *Consumes* `ended`. *Produces* messages of the session's stream.
        """
        was_closed = False
        while True:
            num_leases, is_closed_now = self._collect()
            was_closed |= is_closed_now
            while self._is_due() and not self.is_lost and self._tell():
                pass
            with self._lock:
                self._num_leases -= num_leases
                if self.is_lost:
                    break  # without a node there are no leases
                if self._is_closing and self._num_leases <= 0 and not self._num_in_flight:
                    break
            if was_closed and not self._unsaid:
                self._told.set()
        self._leave()
        self._told.set()

    def _collect(self) -> tuple[int, bool]:
        """Add the leases that ended to `_unsaid`. Return their number, and True if `close` was called and all leases
        that ended before it are included.

        The call waits at most `TICK_S` for the first lease number.
        """
        before = len(self._unsaid)
        was_closed = False
        try:
            lease = self.ended.get(timeout=TICK_S)
            time.sleep(_GATHER_S)
            while True:
                if lease is None:
                    self._is_closing = was_closed = True
                elif lease != _WAKE:
                    self._unsaid.append(lease)
                if len(self._unsaid) - before >= _MAX_RELEASES:
                    break
                lease = self.ended.get_nowait()
        except Empty:
            pass
        return len(self._unsaid) - before, was_closed

    def _is_due(self) -> bool:
        """Return True if there is something to tell the node."""
        return bool(self._unsaid or self._unheard or self._is_detached) or time.monotonic() >= self._next_beat

    def _tell(self) -> bool:
        """Tell the node what ended. Return False if it did not hear it; the next turn tries again."""
        leases = self._unsaid[:_MAX_RELEASES]
        with self._lock:
            unheard = self._unheard[:_MAX_RELEASES]
        try:
            if self._is_detached:
                self._attach()
            if self.is_lost:
                return False
            given_up = {"unheard": [number for number, _ in unheard], "heard": [heard for _, heard in unheard]}
            reply = self._stream.ask({"ended": leases, **given_up}, self.timeout_s)
            if not take(reply, "the reply to session", "is_open", bool):
                self._lose_at(self.incarnation)
                return False
        except (pa.ArrowException, DataPlaneError) as error:
            level = logging.DEBUG if self._is_detached else logging.INFO
            log.log(level, "the session with %s is interrupted: %s", self.uri, str(error)[:120])
            self._is_detached = True
            self._stream.close()
            return False
        del self._unsaid[: len(leases)]
        with self._lock:
            del self._unheard[: len(unheard)]
        self._next_beat = time.monotonic() + BEAT_S
        return True

    def _attach(self) -> None:
        """Open the session's stream again, over a new connection and with the credentials of now. Lose the session if
        the node does not know it."""
        self.flight = self._own_flight = connect(self.uri, self._credentials)
        self._stream = SessionStream(self.flight, self.uri, {"session": self.token}, self.timeout_s)
        hello = self._stream.hello
        if not take(hello, "the reply to session", "session", str):
            self._lose_at(take(hello, "the reply to session", "incarnation", str))
            return
        self._is_detached = False
        log.info("the session with %s goes on", self.uri)

    def _lose_at(self, incarnation: str) -> None:
        """Mark the session as lost, because this incarnation of the node does not know it. If it is the one that gave
        the memory, it may reuse the memory, so nothing here may use it."""
        self.is_lost = True
        if incarnation == self.incarnation:
            log.error(
                "the node at %s ended the session of this %s, because process %d closed the file that showed that it "
                "is alive: what was mapped cannot be used any more",
                self.uri,
                self.kind,
                self._pid,
            )
            self.on_same_node_lost()

    def _leave(self) -> None:
        """End the session at the node if it is closed, and let its lock go. A lost session keeps the lock until this
        object is gone, because its views may still be read."""
        if not self.is_lost:
            if not self._is_detached:
                with suppress(pa.ArrowException, DataPlaneError):
                    self._stream.ask({"ended": [], "end": True}, 2 * TICK_S)
            if self._presence is not None:
                self._presence.release()
        self._stream.close()
        if self._own_flight is not None:
            self._own_flight.close()
        self.on_end()
