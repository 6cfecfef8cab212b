"""Waiting for a node that went away: until it is back on its address, for as long as the call may take.

A node that was never reached is an error at once (a wrong address is no reason to wait). One that answered before is
given until the call's deadline to come back, then the call is sent again: every verb may come twice.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import NodeUnavailableError, StreamLostError
from dataplane.core.flight_errors import from_flight

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
MIN_ATTEMPT_S = 0.01
GRACE_S = 3.0
"""The node's own deadline is tighter and its answer says more: who waits for it gives up this much later."""

_SIGNS = ("Socket closed", "Connection reset", "Broken pipe", "Stream removed", "GOAWAY")
"""What gRPC says, under several of its codes, when the other side is gone."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def is_gone(error: pa.ArrowException) -> bool:
    """Whether nobody answered, or the connection broke: no answer of a node, which would carry its own error."""
    if isinstance(error, fl.FlightError) and error.extra_info:
        return False
    if isinstance(error, (fl.FlightUnavailableError, fl.FlightCancelledError)):
        return True
    return not isinstance(error, fl.FlightTimedOutError) and any(sign in str(error) for sign in _SIGNS)


class NodeRetry:
    """Makes calls to one node, again where it went away in the middle. Thread-safe."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.was_reached = False
        """The node answered once; from then on it is waited for."""

    def call(self, what: str, attempt: Callable[[float], T], timeout_s: float) -> T:
        """What `attempt` gives; it is told the seconds that are left, and raises what Flight raised or StreamLostError.

        Waits for: the node to come back, until `timeout_s`. Raises our error, as `from_flight` reads it.
        """
        started = time.monotonic()
        pause_s, num_tries = FIRST_PAUSE_S, 0
        while True:
            num_tries += 1
            left_s = started + timeout_s - time.monotonic()
            try:
                result = attempt(max(MIN_ATTEMPT_S, left_s))
            except pa.ArrowException as raised:
                error = from_flight(raised, self.uri, what, timeout_s)
                if not is_gone(raised):
                    self.was_reached |= isinstance(raised, fl.FlightError) and bool(raised.extra_info)
                    raise error from raised
                cause: Exception = raised
            except StreamLostError as raised:
                error = cause = raised
            else:
                self.was_reached = True
                return result
            if not self.was_reached:
                raise error from cause
            waited_s = time.monotonic() - started
            if waited_s + pause_s >= timeout_s:
                raise NodeUnavailableError(
                    f"{error} It answered before: {what} was tried {num_tries} time(s) in {waited_s:.1f} s of "
                    f"timeout_s={timeout_s:g}; start it again on the same address, or wait longer"
                ) from cause
            if num_tries == 1:
                log.warning("no node at %s any more; %s waits for it up to %g s", self.uri, what, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
