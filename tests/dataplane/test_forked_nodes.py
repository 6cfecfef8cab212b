"""Tests of the nodes that tests fork: they are children of the test's process, as those that are started are."""

import os
import signal

import psutil
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode


def look_at_one() -> tuple[bool, int]:
    """Start, use and kill a node. Return whether it was forked, and the number of files that it had open first."""
    with EmbeddedNode(memory_bytes=1 << 20, roots={}, restart=False) as node:
        process = psutil.Process(node.pid)
        is_forked = "tests.dataplane.forked_nodes" in process.cmdline()
        num_files = min(process.num_fds() for _ in range(20))  # some are open for a moment
        assert is_forked or "--embedded" in process.cmdline()
        assert (process.ppid(), os.getsid(node.pid), os.getpgid(node.pid)) == (os.getpid(), node.pid, node.pid)
        with Client(node.uri) as client:
            assert client.get(client.put(b"x", name="x").name) == b"x"
        os.kill(node.pid, signal.SIGKILL)
        assert node._process._process.wait(20) == -signal.SIGKILL
    return is_forked, num_files


def test_a_node_is_forked_unless_its_environment_differs_in_what_libraries_read_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_forked, num_files = look_at_one()
    assert is_forked
    monkeypatch.setenv("LD_BIND_NOW", "1")
    assert look_at_one() == (False, num_files)


@pytest.mark.usefixtures("started_nodes")
def test_tests_of_how_nodes_begin_and_end_have_started_ones() -> None:
    is_forked, _ = look_at_one()
    assert not is_forked
