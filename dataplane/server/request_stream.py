"""The requests of a DoExchange stream, one after the other, until the stream ends."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, DataPlaneError
from dataplane.core.json_body import parse
from dataplane.core.schemas import arrow_errors_as_bad_requests
from dataplane.server.auth import caller_of
from dataplane.server.call_limits import BODIES
from dataplane.server.services import Services

log = logging.getLogger(__name__)


class RequestStream:
    """The JSON requests of a stream until it ends for any reason. A request is timed until the caller takes the next
    one."""

    def __init__(
        self,
        services: Services,
        reader: fl.MetadataRecordBatchReader,
        context: fl.ServerCallContext,
        what: str,
        *,
        note: str | None = None,
    ) -> None:
        """`note`: the key of messages that only tell the node something. They are accepted even if the caller's token
        is not valid any more."""
        self._held_bytes = 0
        self.unconfirmed: list[int] = []
        """The leases of the last reply, until a message or the orderly end of the stream shows that the reply
        arrived."""
        self._reader = reader
        self._context = context
        self._what = what
        self._note = note
        self._meter = services.meter
        self._caller = caller_of(context)
        self._started = 0.0
        self._error = ""

    def __del__(self) -> None:
        self._hold(0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def refusal(self, error: DataPlaneError) -> dict[str, Any]:
        """Return the reply that carries an error. The stream continues after it."""
        self._error = type(error).__name__
        return {"error": self._error, "message": str(error)}

    def __next__(self) -> dict[str, Any]:
        if self._started:
            self._meter.count_call(self._what, time.perf_counter() - self._started, self._error)
            self._started, self._error = 0.0, ""
        self._hold(0)
        try:
            with arrow_errors_as_bad_requests(self._what):
                chunk = self._reader.read_chunk()
        except StopIteration:
            if not self._context.is_cancelled():
                self.unconfirmed = []
            raise
        except BadRequestError:
            if not self._context.is_cancelled():
                raise
            raise StopIteration from None
        except pa.ArrowException as error:
            log.info("a stream broke (%s): its process died or gave up", str(error).split(".")[0])
            raise StopIteration from error
        self.unconfirmed = []
        self._started = time.perf_counter()
        self._hold(chunk.app_metadata.size if chunk.app_metadata is not None else 0)
        message = parse(chunk.app_metadata, self._what)
        if self._note not in message:
            self._caller.check_again()
        return message

    def _hold(self, nbytes: int) -> None:
        """Count the bytes of the present request. An OverloadedError ends the stream."""
        BODIES.give_back(self._held_bytes)
        self._held_bytes = 0
        BODIES.take(nbytes)
        self._held_bytes = nbytes
