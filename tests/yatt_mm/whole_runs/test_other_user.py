"""Tests that the program that tries a run as another user finds what is open, and does not find what is closed."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from torch.distributed import TCPStore

from tests.dataplane.serving import serving
from tests.yatt_mm.whole_runs.other_user import Found, Targets, found_by, trying

pytestmark = [
    pytest.mark.alone,
    pytest.mark.endings,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start a program as another user"),
]
OTHER_USER = 65534
"""The user of Linux that owns nothing."""
SECRET = "a-token-" + "that-is-not-shown"


@dataclass(slots=True)
class Place:
    """A folder with things that another user tries."""

    folder: Path
    """A folder that every user can enter."""
    paths: list[Path] = field(default_factory=list)
    ports: list[tuple[str, int]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    abstract: list[str] = field(default_factory=list)

    def tried(self) -> set[Found]:
        targets = Targets(
            uid=OTHER_USER,
            paths=[str(path) for path in self.paths],
            pids=self.pids,
            secrets=[SECRET],
            ports=self.ports,
            abstract=self.abstract,
        )
        with trying(targets) as process:
            return found_by(process)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="yt-") as folder:
        Path(folder).chmod(0o755)
        yield Place(folder=Path(folder))


@contextmanager
def sleeping(*arguments: str) -> Iterator[int]:
    """Run a process with these arguments, which do nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.communicate(b"\n", timeout=30)


def listening(stack: ExitStack, address: str) -> None:
    """Make a Unix socket that listens until `stack` ends."""
    unix = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
    unix.bind(address)
    unix.listen()


def plant(place: Place, *, modes: tuple[int, int], name: str) -> dict[str, Path]:
    """Make a file, a folder and a segment of shared memory with these modes of files and folders."""
    made = {what: place.folder / f"{name}-{what}" for what in ("token", "folder")}
    made["segment"] = Path(tempfile.mkstemp(prefix="yt-", dir="/dev/shm")[1])
    made["token"].write_text(SECRET)
    made["folder"].mkdir()
    for what, path in made.items():
        path.chmod(modes[1] if what == "folder" else modes[0])
    place.paths += made.values()
    return made


def test_it_finds_files_folders_sockets_and_titles_that_are_open_and_none_that_are_closed(place: Place) -> None:
    with ExitStack() as stack:
        stack.enter_context(contextlib.closing(socket.socket()))
        made = plant(place, modes=(0o644, 0o777), name="open")
        stack.callback(made["segment"].unlink)
        stack.callback(plant(place, modes=(0o600, 0o700), name="closed")["segment"].unlink)
        for name, mode in (("open.sock", 0o777), ("closed.sock", 0o700)):
            listening(stack, str(place.folder / name))
            (place.folder / name).chmod(mode)
            place.paths.append(place.folder / name)
        listening(stack, f"\0{place.folder.name}")
        place.abstract.append(place.folder.name)
        place.pids += [shows := stack.enter_context(sleeping(SECRET)), stack.enter_context(sleeping("nothing"))]
        found = place.tried()
    opened = str(made["folder"])
    assert {(did, what) for did, what, _ in found} == {
        ("read", str(made["token"])),
        ("read", str(made["segment"])),
        ("listed", opened),
        ("filled", opened),
        ("connected", str(place.folder / "open.sock")),
        ("connected", f"@{place.folder.name}"),
        ("shown", f"/proc/{shows}/cmdline"),
    }
    assert (("read", str(made["token"]), SECRET[:20].encode().hex())) in found


def test_it_finds_a_writable_file_and_what_is_behind_an_open_folder(place: Place) -> None:
    for name, mode in (("open", 0o711), ("closed", 0o700)):
        (place.folder / name).mkdir(mode)
        (place.folder / name / "file").touch()
        (place.folder / name / "file").chmod(0o622)
        place.paths += [place.folder / name, place.folder / name / "file"]
    assert place.tried() == {("wrote", str(place.folder / "open" / "file"), "")}


class Pages(http.server.BaseHTTPRequestHandler):
    """A web server that shows one page to every caller, or asks for a token."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(b"# HELP num_calls" if self.status == 200 else b"no token")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_it_finds_ports_that_answer_without_a_token_in_the_language_of_each(place: Place, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{SECRET} admin\n")
    tokens.chmod(0o600)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        sender = stack.enter_context(context.socket(zmq.PULL))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        webs = []
        for status in (200, 401):
            pages = type("Some", (Pages,), {"status": status})
            web = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), pages))
            threading.Thread(target=web.serve_forever, daemon=True).start()
            stack.callback(web.shutdown)
            webs.append(web.server_port)
        nodes = [
            int(stack.enter_context(serving(tmp_path / f"log{len(flags)}", *flags)).uri.rpartition(":")[2])
            for flags in ((), ("--token-file", str(tokens)))
        ]
        ports = {
            "zmq": sender.bind_to_random_port("tcp://127.0.0.1"),
            "store": store.port,
            "silent": silent.getsockname()[1],
            "page": webs[0],
            "page with a token": webs[1],
            "node": nodes[0],
            "node with a token": nodes[1],
        }
        place.ports += [("127.0.0.1", port) for port in ports.values()]
        found = place.tried()
    names = {f"127.0.0.1:{port}": name for name, port in ports.items()}
    assert {names[where]: got.split(":")[0] for did, where, got in found if did == "called"}.keys() == {
        "zmq",
        "store",
        "page",
        "node",
    }, found
    assert ("called", f"127.0.0.1:{ports['page']}", "counters for Prometheus") in found
    assert all(did == "called" for did, *_ in found)
