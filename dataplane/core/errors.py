"""The exception classes of the data plane, all derived from `DataPlaneError`.

An error crosses processes as (class name, message); `ERRORS` maps the name back to the class.
"""


class DataPlaneError(Exception):
    """The base of all errors of the data plane. A message says what was found, what was wanted and what to change."""


class BadRequestError(DataPlaneError, ValueError):
    """The request is invalid on every node: malformed body, unknown verb, recipe out of range."""


class MissingObjectError(DataPlaneError, LookupError):
    """The node does not hold an object of this name and cannot make it again."""


class OutOfSpaceError(DataPlaneError, MemoryError):
    """The byte budget stayed full until the deadline, or `/dev/shm` is smaller than the budget."""


class DatasetError(DataPlaneError, ValueError):
    """The data set cannot be read: unknown name, empty glob, unreadable or compressed shard."""


class BadMediaError(DataPlaneError, ValueError):
    """A request asks for a medium that is in quarantine because it cannot be decoded."""


class ChecksumError(DataPlaneError, ValueError):
    """The bytes do not match the ref: a shard changed, or the derivation kernel gave another result."""


class NodeTimeoutError(DataPlaneError, TimeoutError):
    """A node did not reply, or did not finish the call, before the deadline."""


class NodeUnavailableError(DataPlaneError, ConnectionError):
    """No node listens at the address, or the node stopped in the middle of a call."""


class UnauthenticatedError(DataPlaneError, PermissionError):
    """The node requires a token, but the client sent no token, an unknown token, or a token that has expired."""


class ForbiddenError(DataPlaneError, PermissionError):
    """The client's token is valid, but does not have the right that the verb needs."""


class OverloadedError(DataPlaneError, RuntimeError):
    """The node refused a call, stream or lease because its limit on them is reached: retry later, or ask for less."""


class StreamLostError(NodeUnavailableError):
    """A stream to the node ended during a call. Another stream may succeed."""


class SessionLostError(StreamLostError):
    """The node does not know the session of a stream: the node restarted, or the session ended. A new session may
    succeed."""


class PeerError(DataPlaneError, ConnectionError):
    """The other node that holds the object could not be reached, or did not send all of it."""


ERRORS: dict[str, type[DataPlaneError]] = {
    error.__name__: error
    for error in (
        DataPlaneError,
        BadRequestError,
        MissingObjectError,
        OutOfSpaceError,
        DatasetError,
        BadMediaError,
        ChecksumError,
        NodeTimeoutError,
        NodeUnavailableError,
        UnauthenticatedError,
        ForbiddenError,
        OverloadedError,
        StreamLostError,
        SessionLostError,
        PeerError,
    )
}
"""The error classes by name, to rebuild an error that came from another process."""
