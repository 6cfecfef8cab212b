"""Processes that read or write at a node, stand still, and go on: what the tests of standing clients share.

A `Standing` process prints a line when it is at the place where it will stand still, goes on when it gets a line, and
prints what it found. gRPC closes the connection of a process that stands still after a minute; a proxy between the
process and its node closes it at once.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from dataplane.client.client import Client
from dataplane.core.errors import OutOfSpaceError
from dataplane.core.refs import Ref
from tests.dataplane.shards import wait_until

NBYTES = 256 << 10
"""The size in bytes of every object in these tests; big enough that a client writes it into the arena."""

READER = """
    import sys
    from dataplane.client.client import Client
    from dataplane.client.reader import Reader
    uri, direct, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    reader = Reader(uri, timeout_s=30)
    with Client(direct) as client:
        views = reader.resolve([client.put(bytes([at]) * nbytes, name=f"kept/{at}") for at in range(4)])
    print("ready", flush=True)
    sys.stdin.readline()
    print([sorted(set(view.tolist())) for view in views], flush=True)
    with Client(direct) as client:
        again = reader.resolve([client.put(b"again", name="again")])[0]
    print(again.tobytes(), flush=True)
    del views, again
    sys.stdin.readline()
"""
"""Holds views of 4 objects, whose bytes are 0, 1, 2, 3."""

WRITER = """
    import sys
    from dataplane.client.writer import Writer
    writer, nbytes = Writer(sys.argv[1], timeout_s=30), int(sys.argv[3])
    try:
        with writer.create("half", "uint8", (4 * nbytes,)) as place:
            place.array[: 2 * nbytes] = 9
            print("ready", flush=True)
            sys.stdin.readline()
            place.array[:] = 9
        print("sealed", flush=True)
    except ConnectionError as error:
        print(type(error).__name__, flush=True)
    sys.stdin.readline()
"""
"""Stands still while it fills an array in the arena."""

PUTTER = """
    import os, sys
    from dataplane.client.client import Client
    write, nbytes = os.pwrite, int(sys.argv[3])
    def slow(*args):
        os.pwrite = write
        print("ready", flush=True)
        sys.stdin.readline()
        return write(*args)
    os.pwrite = slow
    client = Client(sys.argv[1], timeout_s=300)
    client.stat()  # from now on, calls wait for the node
    print(client.put(bytes([9]) * (4 * nbytes), name="half").name, flush=True)
    sys.stdin.readline()
"""
"""Stands still while it writes an object into the arena; afterwards the client stores the object again."""


class Standing:
    """A process that runs one of the programs above, through `uri`. `direct` is the node's own address."""

    def __init__(self, program: str, uri: str, direct: str) -> None:
        command = [sys.executable, "-c", textwrap.dedent(program), uri, direct, str(NBYTES)]
        # in a session of its own: when a shell ends, the kernel lets the stopped processes of its jobs go on
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pid = self.process.pid
        assert self.line() == "ready"

    def line(self) -> str:
        """Return the next line that the process prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Send the line for which the process waits."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process, if it still runs."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def standing(program: str, uri: str, direct: str) -> Iterator[Standing]:
    """Yield a process that has reached the place where it will stand still, and kill it at the end."""
    process = Standing(program, uri, direct)
    try:
        yield process
    finally:
        process.close()


def stop(pid: int) -> None:
    """Make a process stand still, and return when all of its threads do."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: {psutil.Process(one.id).status() for one in psutil.Process(pid).threads()} == {"stopped"})


def wake(pid: int) -> None:
    """Let a process go on."""
    os.kill(pid, signal.SIGCONT)


def fill(client: Client, turn: str = "") -> list[Ref]:
    """Store objects whose bytes are all 255 until the node's memory is full, and return their refs."""
    timeout_s, client.timeout_s = client.timeout_s, 0.3
    refs: list[Ref] = []
    try:
        while True:
            refs.append(client.put(b"\xff" * NBYTES, name=f"fill{turn}/{len(refs)}"))
    except OutOfSpaceError:
        return refs
    finally:
        client.timeout_s = timeout_s
