"""The data plane alone over two hosts: nodes that find each other in a folder, with TLS and tokens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.common.hosts import Host, Hosts
from tests.dataplane.certificates import Issued, issue
from yatt_mm.common.tokens import write_token

pytestmark = pytest.mark.hosts

NBYTES = 8 << 20
START_S = 60.0
PORT = 8815


@contextmanager
def serving(host: Host, node_id: str, authority: Issued, folder: Path) -> Iterator[list[str]]:
    """Run a node on a host for a `with` block. Give the flags of a command that calls it."""
    files = issue(folder, node_id, authority, [host.address])
    tls = ["--tls-cert", str(files.cert_file), "--tls-key", str(files.key_file), "--tls-ca", str(authority.cert_file)]
    command = [
        *(sys.executable, "-m", "dataplane", "serve", "--node-id", node_id, "--memory", "64MiB", *tls),
        *("--host", host.address, "--port", str(PORT), "--directory", str(folder / "nodes")),
        *("--token-file", str(folder / "tokens"), "--peer-token-file", str(folder / "peer_token")),
    ]
    with (folder / f"{node_id}.log").open("w") as log:
        node = host.start(command, stdout=log, stderr=log)
    entry, deadline = folder / "nodes" / f"{node_id}.json", time.monotonic() + START_S
    try:
        while not entry.exists():
            assert node.poll() is None and time.monotonic() < deadline, (folder / f"{node_id}.log").read_text()
            time.sleep(0.1)
        yield ["--uri", f"grpc+tls://{host.address}:{PORT}", "--token-file", str(folder / "token"), *tls]
    finally:
        # the process on the host, not `nsenter`, which waits for it
        (number,) = (line.split()[0] for line in host.processes() if f"serve --node-id {node_id} " in line)
        os.kill(int(number), signal.SIGTERM)
        assert node.wait(START_S) == 0


def dataplane(host: Host, *words: str) -> str:
    """Run a command of the data plane on a host, and return what it prints."""
    return host.run([sys.executable, "-m", "dataplane", *words])


def refused(host: Host, *flags: str) -> str:
    """Return why a node refuses to tell its counters."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        host.run([sys.executable, "-m", "dataplane", "stat", *flags], stderr=subprocess.PIPE)
    return str(caught.value.stderr)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all hosts see."""
    with tempfile.TemporaryDirectory(prefix="yt-hosts-", dir="/var/tmp") as name:
        yield Path(name)


def test_nodes_alone_fetch_an_object_once_and_refuse_clients_without_a_token(folder: Path) -> None:
    with Hosts(2) as hosts, ExitStack() as stack:
        here, there = hosts[0], hosts[1]
        (folder / "nodes").mkdir(mode=0o700)
        ours, theirs = (write_token(folder / file).read_text().strip() for file in ("token", "peer_token"))
        (folder / "tokens").touch(mode=0o600)
        (folder / "tokens").write_text(f"{ours} write\n{theirs} read\n")
        (folder / "file").write_bytes(os.urandom(NBYTES))
        authority = issue(folder, "authority")
        files = [host.files() for host in (here, there)]
        flags = {}
        for node_id, host in (("a", here), ("b", there)):
            flags[node_id] = stack.enter_context(serving(host, node_id, authority, folder))
        ref = dataplane(here, "put", str(folder / "file"), "--name", "x", "--json", *flags["a"])
        before = here.counters().sent
        for copy in ("first", "second"):
            dataplane(there, "get", ref, "--output", str(folder / copy), *flags["b"])
            assert (folder / copy).read_bytes() == (folder / "file").read_bytes()
        assert NBYTES < here.counters().sent - before < 1.05 * NBYTES, "the object crossed once"
        assert "num_objects" in dataplane(there, "stat", *flags["b"])
        wrong = [*flags["b"], "--token-file", str(write_token(folder / "another_token"))]
        assert "token" in refused(there, *wrong)
        without_tls = ["--uri", f"grpc://{there.address}:{PORT}", "--token-file", str(folder / "token")]
        assert "TLS" in refused(there, *without_tls)
        stack.close()
        assert not list((folder / "nodes").iterdir())
        assert [host.files() for host in (here, there)] == files
