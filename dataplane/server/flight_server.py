"""The Flight server of a node. Each verb parses its request and calls the store, the datasets or the deriver, nothing
more.

DoPut stores, DoGet streams, DoAction does the rest; the DoExchange streams are in `do_exchange.py`. An invalid request
gets a Flight error that explains it, and the node stays up. Every call is checked against the right of its token:
`VERB_RIGHTS` here, and the tables of `actions.py` and `do_exchange.py`, say which right a verb needs.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, DataPlaneError
from dataplane.core.flight_errors import to_flight
from dataplane.core.json_body import SMALL_BODY_BYTES, dump, parse, take
from dataplane.core.process import TRIMMER
from dataplane.core.rights import Right, check_right
from dataplane.core.token_file import TokenFile
from dataplane.server import do_get, flight_info
from dataplane.server.actions import ACTIONS
from dataplane.server.auth import GATE, Gate, caller_of, host_in_uri, is_wildcard, right_of
from dataplane.server.call_limits import BODIES, Slots
from dataplane.server.config import NodeConfig
from dataplane.server.do_exchange import EXCHANGES
from dataplane.server.do_put import receive
from dataplane.server.meter import Meter, error_kind
from dataplane.server.services import Services

REUSE_CONNECTION = "arrow-flight-reuse-connection://?"
"""The address that, in Flight, means the connection over which the reply came."""
VERB_RIGHTS: Mapping[str, Right] = {
    "list_actions": Right.READ,
    "list_flights": Right.READ,
    "get_flight_info": Right.READ,
    "get_schema": Right.READ,
    "do_get": Right.READ,
    "do_put": Right.WRITE,
}
"""The right that each Flight verb needs. Actions and exchanges have tables of their own."""

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


def _answers_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Wrap a verb so that it raises errors of the data plane as Flight errors. An unexpected error is logged and
    reported, and the node continues."""

    @functools.wraps(verb)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except DataPlaneError as error:
            raise to_flight(error) from error
        except (fl.FlightError, pa.ArrowException):
            raise
        except Exception as error:
            if isinstance(error, OSError) and _is_cancelled(args):
                raise fl.FlightCancelledError(f"{verb.__name__}: the caller went away ({error})") from error
            log.exception("%s failed", verb.__name__)
            raise fl.FlightInternalError(f"{verb.__name__}: {type(error).__name__}: {error}") from error

    return wrapper


def _is_cancelled(args: Iterable[object]) -> bool:
    """Return True if the caller of this call is gone. Writing to it then fails in several ways."""
    return any(isinstance(arg, fl.ServerCallContext) and arg.is_cancelled() for arg in args)


class FlightServer(fl.FlightServerBase):
    """The Flight server of a node. It serves from gRPC's threads as soon as it is constructed."""

    def __init__(self, config: NodeConfig, services: Services, tokens: TokenFile | None) -> None:
        self._config = config
        self._services = services
        self._calls = Slots(services.call_limits.max_calls, "calls", "--max-calls")
        self._brief_calls = Slots(services.call_limits.max_calls, "calls that free memory", "--max-calls")
        self._streams = Slots(services.call_limits.max_streams, "streams", "--max-streams")
        gate = Gate(tokens, services.meter)
        security = config.security
        try:
            super().__init__(self._location(config.port), middleware={GATE: gate}, **security.server_options())
        except (pa.ArrowException, OSError) as error:
            raise BadRequestError(
                f"port {config.port} is taken on {config.host}, or may not be used; choose --port, and a --host of "
                "this machine"
            ) from error

    @property
    def uri(self) -> str:
        """The address at which this server listens."""
        return self._location(self.port)

    @property
    def public_uri(self) -> str:
        """The address that others use: the one that the owner of the node gave, or else `uri`."""
        return self._config.advertise or (REUSE_CONNECTION if is_wildcard(self._config.host) else self.uri)

    def _location(self, port: int) -> str:
        return f"{self._config.security.scheme}://{host_in_uri(self._config.host)}:{port}"

    @_answers_errors
    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        """Return every action with its body and its reply."""
        with self._call(context, "ListActions", VERB_RIGHTS["list_actions"]):
            return [(name, action.text) for name, action in ACTIONS.items()]

    @_answers_errors
    def list_flights(self, context: fl.ServerCallContext, criteria: bytes) -> Iterator[fl.FlightInfo]:
        """Yield the first thousand resident objects whose names begin with the criteria."""
        with self._call(context, "ListFlights", VERB_RIGHTS["list_flights"]):
            return iter(list(flight_info.listing(self._services, criteria, self.public_uri)))

    @_answers_errors
    def get_flight_info(self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor) -> fl.FlightInfo:
        """Return an object's size and schema, and a ticket for DoGet."""
        with self._call(context, "GetFlightInfo", VERB_RIGHTS["get_flight_info"]):
            return flight_info.info(self._services, descriptor, self.public_uri)

    @_answers_errors
    def get_schema(self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor) -> fl.SchemaResult:
        """Return the schema of an object's stream."""
        with self._call(context, "GetSchema", VERB_RIGHTS["get_schema"]):
            return flight_info.schema(self._services, descriptor)

    @_answers_errors
    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        """Run an action, whose body is JSON, and return its reply as JSON."""
        verb = ACTIONS.get(action.type)
        right = verb.right if verb else Right.READ
        with self._call(
            context, action.type if verb else "unknown", right, is_brief=verb is not None and verb.is_brief
        ):
            if verb is None:
                raise BadRequestError(f"action {action.type!r} is unknown; wanted one of {', '.join(ACTIONS)}")
            if action.body.size > verb.max_bytes:
                TRIMMER.request()
            with BODIES.held(action.body.size):
                body = parse(action.body, f"the body of {action.type}", verb.max_bytes) if action.body.size else {}
                return [dump(verb.run(self._services, body, caller_of(context)))]

    @_answers_errors
    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        """Return an object's stream of uint8 batches. Dtype, shape and meta are in the schema's metadata."""
        sending = _Sending(self._services.meter, self._calls)
        try:
            check_right(right_of(context), VERB_RIGHTS["do_get"], "DoGet")
            sending.begin(do_get.stream(self._services, ticket))
        except BaseException as error:
            sending.fail(error)
            raise
        return fl.RecordBatchStream(pa.RecordBatchReader.from_batches(sending.schema, sending))

    @_answers_errors
    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Store the one column of a stream of batches. The ref comes back as metadata."""
        with self._call(context, "DoPut", VERB_RIGHTS["do_put"]):
            ref = receive(self._services, descriptor, reader)
            writer.write(pa.py_buffer(dump(ref.to_dict())))

    @_answers_errors
    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """Run a stream of requests and replies. The descriptor names its verb: session, resolve, put or scopes."""
        body, verb = self._asked_stream(context, descriptor)
        with self._services.meter.stream(verb):
            check_right(right_of(context), EXCHANGES[verb].right, verb)
            with self._streams.held():
                EXCHANGES[verb].run(self._services, context, body, reader, writer)

    def _asked_stream(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> tuple[dict[str, Any], str]:
        with self._services.meter.stream("unknown"):
            check_right(right_of(context), Right.READ, "DoExchange")
            body = parse(descriptor.command, "the descriptor of DoExchange", SMALL_BODY_BYTES)
            verb = take(body, "the descriptor of DoExchange", "verb", str)
            if verb not in EXCHANGES:
                raise BadRequestError(f"verb {verb!r} of DoExchange is unknown; wanted one of {', '.join(EXCHANGES)}")
        return body, verb

    @contextmanager
    def _call(
        self, context: fl.ServerCallContext, verb: str, right: Right, *, is_brief: bool = False
    ) -> Iterator[None]:
        """Do what every call needs: check the right, hold a slot, and count the call."""
        with self._services.meter.call(verb):
            check_right(right_of(context), right, verb)
            if verb == "end_leases":  # a refused `end_leases` would keep what it should free
                yield
                return
            with (self._brief_calls if is_brief else self._calls).held():
                yield


class _Sending:
    """The batches of a DoGet. When gRPC drops this object, the call is over: it is counted and its slot given back."""

    def __init__(self, meter: Meter, slots: Slots) -> None:
        self._meter = meter
        self._slots: Slots | None = None
        self._started = time.perf_counter()
        self._error = ""
        slots.take()
        self._slots = slots

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        return self._reader.schema

    def begin(self, reader: pa.RecordBatchReader) -> None:
        """Set the batches that will be sent."""
        self._reader = reader

    def fail(self, error: BaseException) -> None:
        """Note the error with which the call ends."""
        self._error = error_kind(error)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            batch = self._reader.read_next_batch()
        except StopIteration:
            raise
        except BaseException as error:
            self.fail(error)
            raise
        self._meter.count_bytes(sent=batch.nbytes)
        return batch

    def __del__(self) -> None:
        if self._slots is not None:
            self._slots.give_back()
            self._meter.count_call("DoGet", time.perf_counter() - self._started, self._error)
