"""Flight as it lies on the wire: its protobuf messages and Arrow's IPC bodies, by hand, so that they may be wrong.

A Flight client library refuses to send most of what a node must survive. These are the few messages of Flight.proto,
the parts of an encapsulated IPC message, and an HTTP/2 connection small enough to spoil.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

Ending = Literal["close", "cancel", "drop"]
"""Half-close and read on; cancel the call after the last message; cancel it after the first answer."""

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
    """Which corpus entry, and what was done to it."""
    headers: Sequence[tuple[str, str | bytes]] = ()
    leaves: Sequence[str] = field(default=())
    """Names of objects and scopes that it may leave behind, to be released afterwards."""


def varint(number: int) -> bytes:
    """An unsigned protobuf number."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """A protobuf message of numbered fields; bytes and numbers are all that Flight has."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def fields_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The bytes fields of a message that the node sent."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value, at = _read_varint(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + value]
            at += value


def action(verb: str | bytes, body: bytes) -> bytes:
    """`Action`."""
    return message((1, verb.encode() if isinstance(verb, str) else verb), (2, body))


def ticket(body: bytes) -> bytes:
    """`Ticket`."""
    return message((1, body))


def command(body: bytes) -> bytes:
    """`FlightDescriptor` of type CMD."""
    return message((1, 2), (2, body))


def path(*parts: bytes) -> bytes:
    """`FlightDescriptor` of type PATH."""
    return message((1, 1), *((3, part) for part in parts))


def flight_data(
    descriptor: bytes | None = None, header: bytes = b"", metadata: bytes | None = None, body: bytes | None = None
) -> bytes:
    """`FlightData`."""
    parts: list[tuple[int, bytes | int]] = [] if descriptor is None else [(1, descriptor)]
    if header:
        parts.append((2, header))
    if metadata is not None:
        parts.append((3, metadata))
    if body is not None:
        parts.append((1000, body))
    return message(*parts)


def ipc_parts(batch: pa.RecordBatch) -> tuple[bytes, bytes, bytes]:
    """The flatbuffers of a batch's schema and of itself, and its body."""
    schema, record = batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes()
    return _header(schema)[0], *_header(record)


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def http2_call(method: str, payload: bytes) -> bytes:
    """A whole connection: preface, SETTINGS, HEADERS of a gRPC call, DATA with its one message."""
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
