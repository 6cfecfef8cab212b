"""Flight's bytes on the network, written by hand so that they may be wrong: protobuf messages and Arrow's IPC bodies.

A Flight client library refuses to send most of what a node must survive. Here are the few messages of Flight.proto, the
parts of an encapsulated IPC message, and a small HTTP/2 connection that can be damaged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

Ending = Literal["close", "cancel", "drop"]
"""How a call ends: half-close and read on; cancel after the last message; cancel after the first reply."""

SERVICE = "/arrow.flight.protocol.FlightService/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call: everything that is sent, and how it ends."""

    index: int
    method: str
    """The path of the RPC; empty for bytes on the bare TCP connection."""
    messages: Sequence[bytes]
    ending: Ending = "close"
    how: str = "good"
    """The name of the good request, and the damage that was done to it."""
    headers: Sequence[tuple[str, str | bytes]] = ()
    leaves: Sequence[str] = field(default=())
    """The names of objects and scopes that the call may leave behind; they are released afterwards."""


def varint(number: int) -> bytes:
    """Return an unsigned number in protobuf's encoding."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """Return a protobuf message of numbered fields. Flight has only bytes and numbers."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def fields_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each bytes field of a message that the node sent."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value, at = _read_varint(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + value]
            at += value


def action(verb: str | bytes, body: bytes) -> bytes:
    """Return an `Action` message."""
    return message((1, verb.encode() if isinstance(verb, str) else verb), (2, body))


def ticket(body: bytes) -> bytes:
    """Return a `Ticket` message."""
    return message((1, body))


def command(body: bytes) -> bytes:
    """Return a `FlightDescriptor` message of type CMD."""
    return message((1, 2), (2, body))


def path(*parts: bytes) -> bytes:
    """Return a `FlightDescriptor` message of type PATH."""
    return message((1, 1), *((3, part) for part in parts))


def flight_data(
    descriptor: bytes | None = None, header: bytes = b"", metadata: bytes | None = None, body: bytes | None = None
) -> bytes:
    """Return a `FlightData` message."""
    parts: list[tuple[int, bytes | int]] = [] if descriptor is None else [(1, descriptor)]
    if header:
        parts.append((2, header))
    if metadata is not None:
        parts.append((3, metadata))
    if body is not None:
        parts.append((1000, body))
    return message(*parts)


def ipc_parts(batch: pa.RecordBatch) -> tuple[bytes, bytes, bytes]:
    """Return the flatbuffers of a batch's schema and of the batch, and the batch's body."""
    schema, record = batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes()
    return _header(schema)[0], *_header(record)


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def http2_call(method: str, payload: bytes) -> bytes:
    """Return a whole connection as bytes: preface, SETTINGS, HEADERS of a gRPC call, DATA with its one message."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(b"\x00" + _hpack(name) + _hpack(value) for name, value in headers.items())
    data = b"\x00" + len(payload).to_bytes(4, "big") + payload
    frames = [(4, 0, 0, b""), (1, 4, 1, block), (0, 1, 1, data)]
    return PREFACE + b"".join(http2_frame(*frame) for frame in frames)


def _header(encapsulated: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(encapsulated[4:8], "little")
    return encapsulated[8 : 8 + size], encapsulated[8 + size :]


def _hpack(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
