"""The Flight verbs of a node. Each parses its request and calls the store, the datasets or the deriver; nothing more.

DoPut stores, DoGet streams, DoAction does the rest; the DoExchange streams are in `exchanges.py`. A request that makes
no sense gets a Flight error that says so, and the node stays up.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from dataplane import gets
from dataplane.actions import ACTIONS
from dataplane.errors import BadRequestError, DataPlaneError
from dataplane.exchanges import EXCHANGES
from dataplane.receive import receive
from dataplane.rights import Right, check_right
from dataplane.security import GATE, Gate, Security, host_in_uri, right_of
from dataplane.tokens import TokenFile
from dataplane.wire import dump, parse, take, to_flight

if TYPE_CHECKING:
    from dataplane.node import Node

VERB_RIGHTS: Mapping[str, Right] = {"list_actions": Right.READ, "do_get": Right.READ, "do_put": Right.WRITE}
"""The rights of Flight verbs that do one thing; actions and exchanges have tables of their own."""

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


def _answers_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Our errors become Flight errors; a bug is logged here and reported, and the node goes on."""

    @functools.wraps(verb)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except DataPlaneError as error:
            raise to_flight(error) from error
        except (fl.FlightError, pa.ArrowException):
            raise
        except Exception as error:
            log.exception("%s failed", verb.__name__)
            raise fl.FlightInternalError(f"{verb.__name__}: {type(error).__name__}: {error}") from error

    return wrapper


class FlightServer(fl.FlightServerBase):
    """Serves a node from gRPC's own threads, from construction on."""

    def __init__(self, host: str, port: int, node: "Node", security: Security) -> None:
        self._node = node
        gate = Gate(TokenFile(security.token_file) if security.token_file else None)
        location = f"{security.scheme}://{host_in_uri(host)}:{port}"
        try:
            super().__init__(location, middleware={GATE: gate}, **security.server_options())
        except (pa.ArrowException, OSError) as error:
            raise BadRequestError(
                f"port {port} is taken on {host}, or may not be used; choose --port, and a --host of this machine"
            ) from error

    @_answers_errors
    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        """Every action with its body and answer."""
        check_right(right_of(context), VERB_RIGHTS["list_actions"], "ListActions")
        return [(name, action.text) for name, action in ACTIONS.items()]

    @_answers_errors
    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        """A JSON body in, a JSON body out."""
        if action.type not in ACTIONS:
            raise BadRequestError(f"action {action.type!r} is unknown; wanted one of {', '.join(ACTIONS)}")
        check_right(right_of(context), ACTIONS[action.type].right, action.type)
        body = parse(action.body or b"{}", f"the body of {action.type}") if action.body.size else {}
        return [dump(ACTIONS[action.type].run(self._node, body))]

    @_answers_errors
    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        """Stream an object as uint8 batches; dtype, shape and meta stand in the schema's metadata."""
        check_right(right_of(context), VERB_RIGHTS["do_get"], "DoGet")
        return gets.stream(self._node, ticket)

    @_answers_errors
    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Store the one column of a stream of batches; the ref comes back as metadata."""
        check_right(right_of(context), VERB_RIGHTS["do_put"], "DoPut")
        ref = receive(self._node, descriptor, reader)
        writer.write(pa.py_buffer(dump(ref.to_dict())))

    @_answers_errors
    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """A stream of requests and answers; its verb stands in the descriptor: session, resolve, put, scopes."""
        body = parse(descriptor.command, "the descriptor of DoExchange")
        verb = take(body, "the descriptor of DoExchange", "verb", str)
        if verb not in EXCHANGES:
            raise BadRequestError(f"verb {verb!r} of DoExchange is unknown; wanted one of {', '.join(EXCHANGES)}")
        check_right(right_of(context), EXCHANGES[verb].right, verb)
        EXCHANGES[verb].run(self._node, context, body, reader, writer)
