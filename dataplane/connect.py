"""Opening connections to nodes: the one place where Flight clients are made, with what they show to be let in."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.errors import BadRequestError

CLIENT_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.optimization_target", "throughput"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client shows a node, and how it knows the node."""

    token: str = ""
    """Bearer token; empty shows none."""

    def __repr__(self) -> str:
        return f"Credentials(token={'...' if self.token else 'none'})"


def connect(uri: str, credentials: Credentials | None = None) -> fl.FlightClient:
    """A Flight client of the node at `uri`; it connects on first use. BadRequestError if `uri` is no address."""
    try:
        return fl.FlightClient(uri, generic_options=CLIENT_OPTIONS)
    except pa.ArrowException as error:
        raise BadRequestError(f"{uri!r} is no address of a node ({error}); wanted grpc://127.0.0.1:PORT") from error
