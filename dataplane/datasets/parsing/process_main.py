"""The main program of a parser process: it does one task at a time for the node that started it.

It is started with `python -m dataplane.datasets.parsing.process_main FD NODE_PID`. A local file comes as a descriptor
with each request; ranges of a remote file are asked of the node. It opens no file of a data set itself, and ends with
the node.
"""

import json
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from dataplane.core.errors import DatasetError
from dataplane.core.process import limit_memory, limit_private_memory, return_freed_memory, signal_on_parent_death
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.parsing.frames import Frame, FrameSocket, Kind
from dataplane.datasets.parsing.no_network import take_network_away
from dataplane.datasets.parsing.tasks import Tasks

MEMORY_BYTES = 3 << 30
"""The memory in bytes that a parser may take: a group of rows as it is stored, decoded, and on its way to the node."""
ADDRESS_BYTES = 64 << 30
"""The addresses that it may map: the batch of an Arrow file, most of which is never touched (`formats/arrow.py`)."""
MAX_READ_BYTES = 1 << 30
"""The largest range of a remote file."""
_KEPT_BYTES = 64 << 20
"""Freed memory goes back to the system after replies of as many bytes."""

log = logging.getLogger(__name__)


class NodeFiles:
    """Remote files as an fsspec filesystem, as far as `RangeFile` needs one. The node reads them."""

    def __init__(self, sock: FrameSocket) -> None:
        self._sock = sock

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Return a range of the file of the present task. Raises OSError if the node cannot read it."""
        self._sock.send(Kind.READ, json.dumps([start, end - start]).encode())
        frame = self._sock.receive(MAX_READ_BYTES)
        if frame.kind == Kind.BYTES:
            return bytes(frame.buffers[0])
        raise OSError(frame.head.decode())


def main(fd: int, node_pid: int) -> None:
    """Do tasks until the node closes its end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != node_pid:
        return  # the node died before the line above
    try:
        take_network_away()
    except OSError as error:
        log.warning("this system cannot take the network from parsers: %s", error)
    limit_private_memory(MEMORY_BYTES)
    limit_memory(ADDRESS_BYTES)
    sock = FrameSocket(socket.socket(fileno=fd))
    tasks, remote, sent_bytes = Tasks(), NodeFiles(sock), 0
    sock.send(Kind.READY)
    while True:
        try:
            frame = sock.receive(0, takes_descriptors=True)
            sent_bytes += _answer(sock, tasks, frame, remote)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        if sent_bytes >= _KEPT_BYTES:
            sent_bytes = 0
            return_freed_memory()


def _answer(sock: FrameSocket, tasks: Tasks, frame: Frame, remote: NodeFiles) -> int:
    """Do one task, and return how many bytes its replies took."""
    request = json.loads(frame.head)
    file = RangeFile(filesystem=None if frame.fd is not None else remote, **request["file"])
    file = replace(file, fd=frame.fd)
    num_bytes, is_answered = 0, False
    try:
        replies = tasks.run(request["task"], file, request["arguments"])
        reply, following = next(replies, None), None
        while reply is not None:
            following = next(replies, None)
            sock.send(Kind.REPLY if following is not None else Kind.LAST, reply.head, reply.buffers)
            num_bytes += sum(map(len, reply.buffers))
            reply, is_answered = following, True
        if not is_answered:
            sock.send(Kind.END)
    except DatasetError as error:
        sock.send(Kind.ERROR, _text(error))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        raise
    except Exception as error:  # damage that nothing of the format's code expected
        log.exception("%s: %s failed", file.path, request["task"])
        sock.send(Kind.ERROR, _text(f"{file.path} cannot be read: {type(error).__name__} {error}"))
    finally:
        if frame.fd is not None:
            os.close(frame.fd)
    return num_bytes


def _text(said: Any) -> bytes:
    return json.dumps(str(said)).encode()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="dataplane parser %(levelname)s %(message)s", stream=sys.stderr)
    main(int(sys.argv[1]), int(sys.argv[2]))
