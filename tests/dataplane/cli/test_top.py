"""Tests of `top`, and of the progress that the command line shows while it works."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from dataplane.cli.main import main
from dataplane.cli.top import frame
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.serving import serving
from tests.dataplane.shards import wait_until


def drawn(picture: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_frame_shows_what_the_node_did(
    node: EmbeddedNode, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = client.put(b"x" * 100_000, name="top")
    assert client.get(ref) == b"x" * 100_000
    assert main(["top", "--once", "--uri", node.uri]) == 0
    shown = capsys.readouterr().out
    assert "memory" in shown and "of 16 MiB" in shown and "DoPut" in shown and "DoGet" in shown and "good" in shown
    client.release([ref])


def test_rates_are_differences_by_the_second(client: Client) -> None:
    before = client.stat()
    after = client.stat() | {"received_bytes": before["received_bytes"] + (8 << 20)}
    assert "4 MiB" in drawn(frame("grpc://x", after, before, 2.0))


@pytest.mark.parametrize("has_terminal", [True, False])
def test_ctrl_c_ends_it_without_a_trace(node: EmbeddedNode, has_terminal: bool) -> None:
    command = [sys.executable, "-m", "dataplane", "top", "--uri", node.uri, "--interval", "0.05"]
    master, slave = pty.openpty() if has_terminal else os.pipe()
    process = subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE)
    try:
        os.close(slave) if not has_terminal else None
        seen = b""
        while seen.count(b"DoAction") + seen.count(b"stat") < 3:
            part = os.read(master, 65536)
            assert part, "it ended before it was told to"
            seen += part
        process.send_signal(signal.SIGINT)
        os.set_blocking(master, False)
        wait_until(lambda: _read(master) is not None and process.poll() is not None, 60)  # a full pipe would block it
        assert process.returncode == 0
        assert process.stderr is not None and process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]
        os.close(master)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def drain(terminal: int, shown: list[bytes]) -> None:
    """Read until no process has the terminal open any more. A process that writes to a terminal which is not read would
    block."""
    with contextlib.suppress(OSError):  # EIO is its end
        while part := os.read(terminal, 65536):
            shown.append(part)


def test_a_big_file_shows_its_progress_on_a_terminal_and_nothing_elsewhere(
    node: EmbeddedNode, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "big.bin").write_bytes(os.urandom(4 << 20))
    command = [sys.executable, "-m", "dataplane", "put", "--uri", node.uri, "--name", "big", str(tmp_path / "big.bin")]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == b"big\n" and done.stderr == b""
    master, slave = pty.openpty()
    get = [sys.executable, "-m", "dataplane", "get", "--uri", node.uri, "big", "-o", str(tmp_path / "copy.bin")]
    shown: list[bytes] = []
    watching = threading.Thread(target=drain, args=(master, shown), daemon=True)
    with subprocess.Popen(get, stderr=slave) as process:
        os.close(slave)
        watching.start()
        assert process.wait(60) == 0
    watching.join(60)
    assert b"fetching" in b"".join(shown)
    os.close(master)
    assert (tmp_path / "copy.bin").read_bytes() == (tmp_path / "big.bin").read_bytes()
    client.release_names(["big"])


def test_roots_that_match_nothing_are_said_at_the_start(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--root", f"train={tmp_path}/none-*.tar") as served:
        wait_until(lambda: "no file matches" in served.log())
        assert "train" in served.log()


def test_workers_out_of_range_are_refused_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for workers in ("0", "many", "5000"):
        with pytest.raises(SystemExit):
            main(["serve", "--workers", workers])
        assert "wanted 1 to 1024" in capsys.readouterr().err
