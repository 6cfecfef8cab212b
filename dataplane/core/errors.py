"""What can go wrong in the data plane: one small tree. Every error crosses processes as (class name, message)."""


class DataPlaneError(Exception):
    """Any failure of the data plane. Its message says what was found, what was wanted and what to change."""


class BadRequestError(DataPlaneError, ValueError):
    """A request that no node would accept: malformed body, unknown verb, recipe out of range."""


class MissingObjectError(DataPlaneError, LookupError):
    """A name that the node does not hold and cannot make again."""


class OutOfSpaceError(DataPlaneError, MemoryError):
    """The byte budget stayed full until the deadline, or `/dev/shm` is smaller than the budget."""


class DatasetError(DataPlaneError, ValueError):
    """A dataset that cannot be read: unknown name, empty glob, unreadable or compressed shard."""


class BadMediaError(DataPlaneError, ValueError):
    """A medium that cannot be decoded was asked for as if it were good."""


class ChecksumError(DataPlaneError, ValueError):
    """Bytes that are not those the name promises: a changed shard, a kernel that gave another result."""


class NodeTimeoutError(DataPlaneError, TimeoutError):
    """A node did not answer, or could not finish, in time."""


class NodeUnavailableError(DataPlaneError, ConnectionError):
    """No node listens there, or it went away in the middle of a call."""


class UnauthenticatedError(DataPlaneError, PermissionError):
    """A node that wants a token was shown none, one that it does not know, or one that has expired."""


class ForbiddenError(DataPlaneError, PermissionError):
    """The token shown is good, but lacks the right that the verb needs."""


class OverloadedError(DataPlaneError, RuntimeError):
    """A node refused more calls, streams or leases at once than its limits allow; try again later, or ask for less."""


class StreamLostError(NodeUnavailableError):
    """A stream to the node ended in the middle of a call, or the node does not know its session: a new one may do."""


class PeerError(DataPlaneError, ConnectionError):
    """Another node, which holds the object, could not be reached or did not send it whole."""


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
        PeerError,
    )
}
