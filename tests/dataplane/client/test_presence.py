"""Tests of what shows that a client is alive: forks, lost sessions, and leases that the node did not hear of."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.proxy import Proxy
from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.presence import Presence
from dataplane.storage.arena import Segment, reap_dead_segments
from dataplane.storage.presence_file import PresenceFile
from tests.dataplane.serving import serving
from tests.dataplane.shards import wait_until

START = """
    import os, sys, time
    import numpy as np
    from dataplane.client.client import Client
    from dataplane.client.reader import Reader
    from dataplane.client.writer import Writer
    client, reader, writer = Client(sys.argv[1]), Reader(sys.argv[1], timeout_s=20), Writer(sys.argv[1])
    views = reader.resolve([client.put(bytes([at]) * 100_000, name=f"kept/{at}") for at in range(4)])
"""
FORKED = """
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""
TOUCHING = """
    with writer.create("array", "uint8", (100_000,)) as place:
        for array in (views[1], place.array):
            child = os.fork()
            if child == 0:
                filler = [np.full(1 << 20, 7, np.uint8) for _ in range(64)]
                os._exit(int(array[50_000]))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        place.array[:] = 5
    print([int(view[50_000]) for view in views], int(place.array[50_000]), flush=True)
"""
LOST = """
    place = writer.create("array", "uint8", (100_000,))
    written = place.__enter__().array
    used, array = {"reader": (reader, views[1]), "writer": (writer, written)}[sys.argv[2]]
    session = used._current.last.node
    os.close(session._presence._fd)  # as a library does that closes all files of its process
    while not session.is_lost:
        time.sleep(0.05)
    try:
        reader.resolve([client.put(b"x", name="x")])
    except ConnectionError as error:
        print(error, flush=True)
    else:
        print("resolved", flush=True)
    print(int(array[50_000]), flush=True)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    """A node of 4 MiB."""
    with EmbeddedNode(memory_bytes=4 << 20, roots={}) as started:
        yield started


def run(program: str, *args: str) -> "subprocess.Popen[str]":
    """Start a process that has views of 4 objects, and then runs a program."""
    code = textwrap.dedent(START) + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)


def test_a_forked_child_does_not_keep_the_leases_of_its_killed_parent(node: EmbeddedNode) -> None:
    with Client(node.uri) as client, run(FORKED, node.uri) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert client.stat()["num_leases"] == 4
            parent.kill()
            wait_until(lambda: client.stat()["num_leases"] == 0)
            os.kill(child, 0)  # it is there, with the connections of its parent
            assert client.stat()["streams"]["session"] > 0
        finally:
            os.kill(child, signal.SIGKILL)
        client.release_names([f"kept/{at}" for at in range(4)])
        wait_until(lambda: client.stat()["used_bytes"] == 0)


def test_a_child_that_touches_what_its_parent_mapped_is_ended_by_the_system(node: EmbeddedNode) -> None:
    with Client(node.uri) as client, run(TOUCHING, node.uri) as parent:
        assert parent.stdout is not None
        found = parent.stdout.read().split("\n")
        assert found[:2] == [str(-signal.SIGSEGV)] * 2 and found[2] == "[0, 1, 2, 3] 5"
        client.release_names(["array", *(f"kept/{at}" for at in range(4))])
        wait_until(lambda: client.stat()["used_bytes"] == 0)


@pytest.mark.parametrize("kind", ["reader", "writer"])
def test_a_process_whose_session_the_node_ended_cannot_touch_its_memory(node: EmbeddedNode, kind: str) -> None:
    with Client(node.uri) as client, run(LOST, node.uri, kind) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(60) == -signal.SIGSEGV
        assert ("they cannot be read any more" in said) if kind == "reader" else said == "resolved\n"
        client.release_names(["x", *(f"kept/{at}" for at in range(4))])
        wait_until(lambda: client.stat()["used_bytes"] == 0)


OLD, NEW, OWNER = ("old-0123456789abcdef", "new-0123456789abcdef", "own-0123456789abcdef")


def write_tokens(path: Path, *lines: str) -> Path:
    """Write a token file that only this user can read."""
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_lease_ends_although_its_readers_token_was_changed(tmp_path: Path, is_cut: bool) -> None:
    tokens = write_tokens(tmp_path / "tokens", f"{OLD} read", OWNER)
    own = write_tokens(tmp_path / "own", OLD)
    with serving(tmp_path / "log", "--token-file", str(tokens)) as served, Proxy(served.uri) as way:
        with Client(served.uri, credentials=Credentials(token=OWNER)) as client:
            with Reader(way.uri, credentials=Credentials(token_file=own), timeout_s=20) as reader:
                view = reader.resolve([client.put(b"x", name="x")])[0]
                write_tokens(tokens, f"{NEW} read", OWNER)
                with pytest.raises(PermissionError):
                    list(Reader(served.uri, credentials=Credentials(token=OLD)).resolve([]))
                if is_cut:
                    way.cut()
                    wait_until(lambda: "session" not in client.stat()["streams"])
                del view
                gc.collect()
                if is_cut:
                    session = reader._current.last
                    assert session is not None
                    wait_until(lambda: bool(session.node._unsaid) and session.node._is_detached)
                    assert client.stat()["num_leases"] == 1
                    write_tokens(own, NEW)
                wait_until(lambda: client.stat()["num_leases"] == 0)


NODE = """
    import time
    from dataplane.storage.arena import Segment
    from dataplane.storage.presence_file import PresenceFile
    segment = Segment(1 << 16, "left")
    file = PresenceFile(segment)
    print(segment.path, file.describe()["path"], flush=True)
    time.sleep(60)
"""


def test_the_files_of_clients_go_with_their_arena_and_not_before() -> None:
    segment = Segment(1 << 16, "kept")
    files = [PresenceFile(segment) for _ in range(2)]
    presence = Presence(files[0].describe())
    command = [sys.executable, "-c", textwrap.dedent(NODE)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dead:
            assert dead.stdout is not None
            left = [Path(path) for path in dead.stdout.readline().split()]
            assert len(left) == 2 and all(path.exists() for path in left)
            dead.kill()
        reap_dead_segments()
        assert not any(path.exists() for path in left)
        assert all(Path(file.describe()["path"]).exists() for file in files)
        assert [file.holder() for file in files] == [os.getpid(), None], "looking for dead nodes dropped a lock"
        presence.release()
        assert files[0].holder() is None
    finally:
        for file in files:
            file.close()
        segment.unlink()
