"""The session with a node that a reader or writer uses now. When the node has restarted, another session takes over."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dataplane.client.node_session import NodeSession
from dataplane.core.errors import NodeTimeoutError, NodeUnavailableError

log = logging.getLogger(__name__)


class HasNode(Protocol):
    """A session of a reader or writer, over a session with its node."""

    @property
    def node(self) -> NodeSession:
        """The session with the node."""


S = TypeVar("S", bound=HasNode)


class CurrentSession(Generic[S]):
    """The session that is in use. It is opened on first use, and ends when this object is closed or forgotten.
    Thread-safe."""

    def __init__(self, uri: str, open_session: Callable[[float], S]) -> None:
        """`open_session` opens a session within the given number of seconds."""
        self._uri = uri
        self._open_session = open_session
        self._opening = threading.Lock()
        self._is_closed = False
        self.last: S | None = None
        """The session that was used last; None before the first use."""

    def __del__(self) -> None:
        if self.last is not None:
            self.last.node.ended.put(None)

    def get(self, timeout_s: float) -> S:
        """Return the session; if there is none or it was lost, open a new one. One thread opens it while other threads
        wait.

        Raises NodeUnavailableError if the node is the same process as before and views of the lost session may be
        alive, because that node may reuse their memory.
        """
        session = self.last
        if session is not None and not (session.node.is_lost or self._is_closed):
            return session
        if not self._opening.acquire(timeout=timeout_s):
            raise NodeTimeoutError(f"{self._uri} gave no new session in {timeout_s:g} s; raise timeout_s")
        try:
            if self._is_closed:
                raise NodeUnavailableError(f"what was opened for {self._uri} is closed; make a new one")
            lost = self.last
            if lost is None or lost.node.is_lost:
                session = self._open_session(timeout_s)
                if lost is not None:
                    self._check_takeover(lost, session)
                self.last = session
                if self._is_closed:
                    session.node.close()
            assert self.last is not None
            return self.last
        finally:
            self._opening.release()

    def close(self) -> None:
        """End the session when nothing of it is used any more. No other session is opened."""
        self._is_closed = True
        if self.last is not None:
            self.last.node.close()

    def _check_takeover(self, lost: S, session: S) -> None:
        """Raise NodeUnavailableError if views of `lost` cannot be used any more, but may be alive."""
        if session.node.incarnation != lost.node.incarnation:
            log.warning("the node at %s restarted: this %s continues with the new one", self._uri, session.node.kind)
            return
        lost.node.on_same_node_lost()
        if lost.node.has_views:
            session.node.close()
            raise NodeUnavailableError(
                f"the node at {self._uri} ended the session of this {lost.node.kind} and no longer keeps its views in "
                "place: they cannot be read any more; drop them and make a new one"
            )
