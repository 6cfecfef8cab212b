"""The interface of a parser: it does a named task with one file, and its answer is JSON and buffers of bytes.

Everything that interprets a file's structure is such a task (`dataplane/datasets/parsing/tasks.py`). A node runs tasks
in processes of their own. What comes back is checked here and in the modules that use it, because a process that a
hostile file took over may send anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.range_files import RangeFile

MAX_GROUP_BYTES = 512 << 20
"""The maximum of uncompressed bytes of one group of rows."""
_OPEN_S = 60.0
_OPEN_BYTES_PER_S = 4 << 20
_READ_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One part of the answer to a task."""

    head: bytes
    """JSON."""
    buffers: Sequence[bytes | memoryview] = ()

    @classmethod
    def of(cls, head: Any, buffers: Sequence[bytes | memoryview] = ()) -> "Reply":
        """Return a reply whose head is this value."""
        return cls(json.dumps(head).encode(), buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """What one task may take."""

    timeout_s: float
    """The time in seconds, without that of reads that the node makes for it and of waiting for a free parser."""
    max_reply_bytes: int
    """The size of one reply, in bytes."""
    is_opening: bool = False
    """True for tasks that read a file as a whole. They never take the last parser."""


class Parser(Protocol):
    """Does tasks. Thread-safe."""

    def call(
        self,
        task: str,
        file: RangeFile,
        arguments: Mapping[str, Any],
        take: Callable[[Reply], None],
        limits: TaskLimits,
    ) -> None:
        """Do a task, and give each reply to `take`. A task that was interrupted is done again from its beginning, so
        `take` may get the same reply twice.

        Raises DatasetError if the task fails, and the errors of `take`.
        """
        ...


def opening(file: RangeFile) -> TaskLimits:
    """Return the limits of a task that reads a whole file once: its time and the size of an index grow with the
    file."""
    timeout_s = _OPEN_S + file.nbytes / _OPEN_BYTES_PER_S
    return TaskLimits(timeout_s=timeout_s, max_reply_bytes=(1 << 20) + 32 * file.nbytes, is_opening=True)


READING = TaskLimits(timeout_s=_READ_S, max_reply_bytes=2 * MAX_GROUP_BYTES)
"""The limits of a task that reads rows."""


def ask(parser: Parser, task: str, file: RangeFile, arguments: Mapping[str, Any], limits: TaskLimits) -> Reply:
    """Do a task that has one reply, and return it."""
    replies: list[Reply] = []
    parser.call(task, file, arguments, replies.append, limits)
    if not replies:
        raise wrong_reply(file, "no reply")
    return replies[-1]


def json_of(file: RangeFile, reply: Reply) -> Any:
    """Return the JSON value of a reply. Raises DatasetError if it is not JSON."""
    try:
        return json.loads(reply.head)
    except (ValueError, RecursionError) as error:
        raise wrong_reply(file, str(error)) from error


def wrong_reply(file: RangeFile, what: str) -> DatasetError:
    """Return the error for a reply that no task gives: the file may have taken over its parser."""
    return DatasetError(f"{file.path}: its parser gave an answer that cannot be right ({what}); leave the file out")
