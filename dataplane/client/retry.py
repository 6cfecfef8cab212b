"""Retry calls to a node that went away, until it is back on its address or the call's deadline passes.

If the node never replied, a call fails at once, because the address may be wrong. If it replied before, the call
waits for it and is sent again; so every verb may arrive at a node twice.
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
"""The seconds between the first attempt and the second; each later pause is twice as long."""
MAX_PAUSE_S = 0.5
"""The longest pause between two attempts, in seconds."""
MIN_ATTEMPT_S = 0.01
"""The minimum number of seconds that an attempt gets, even at the deadline."""
GRACE_S = 3.0
"""The seconds that the caller of a node waits beyond the deadline: the node's own timeout error says more than
Flight's."""

_SIGNS = ("Socket closed", "Connection reset", "Broken pipe", "Stream removed", "GOAWAY")
"""The texts in gRPC errors of several status codes that mean that the connection to the other side is lost."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def is_gone(error: pa.ArrowException) -> bool:
    """Return whether an error means that no node replied or the connection broke.

    It is False for an error that the node itself sent, and for a timeout.
    """
    if isinstance(error, fl.FlightError) and error.extra_info:
        return False
    if isinstance(error, (fl.FlightUnavailableError, fl.FlightCancelledError)):
        return True
    return not isinstance(error, fl.FlightTimedOutError) and any(sign in str(error) for sign in _SIGNS)


class NodeRetry:
    """Makes calls to one node, and repeats a call if the node goes away during it. Thread-safe."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.was_reached = False
        """True once the node has replied. From then on, calls wait for the node while it is away."""

    def call(self, what: str, attempt: Callable[[float], T], timeout_s: float) -> T:
        """Call `attempt` with the seconds that are left, and return its result. `what` names the call in errors.

        `attempt` may raise the errors of Flight, and StreamLostError. Errors of Flight are converted with `from_flight`
        and raised as DataPlaneError. The call waits up to `timeout_s` for the node to come back.
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
                log.warning("the node at %s is gone; %s waits for it, at most %g s", self.uri, what, timeout_s)
            del error, cause  # their tracebacks hold this frame, which must not hold the views of a later result
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
