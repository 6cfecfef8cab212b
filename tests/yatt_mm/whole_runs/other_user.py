"""What another user of the machine can do with a run: a program that becomes this user and tries what it is told of.

    python -m tests.yatt_mm.whole_runs.other_user < targets.json

It reads a JSON object with the fields of `Targets`, and prints a JSON list of [what it did, with what, what it got]. It
changes nothing that it can enter: a file that it makes in a folder is removed again. Another user's Python may not be
able to read the modules of this one, so everything is imported before the user is changed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0
Found = tuple[str, str, str]
"""What was done (`read`, `wrote`, `listed`, `filled`, `connected`, `called`, `shown`), with what, and what it got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is tried."""

    uid: int | None = None
    """The user and group that the program becomes; None if it stays what it is."""
    paths: Sequence[str] = ()
    """Files, folders, Unix sockets."""
    pids: Sequence[int] = ()
    secrets: Sequence[str] = ()
    """Texts that no process may show in what every user sees of it."""
    ports: Sequence[tuple[str, int]] = ()
    """Addresses of TCP."""
    abstract: Sequence[str] = ()
    """Unix sockets without a file, without the first byte of their names, which is zero."""
    flood: tuple[str, int] | None = None
    """An address of TCP that gets many connections that say nothing and calls without a token. They are held until a
    line can be read from standard input."""


METHODS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.ReporterService/GetTraceback",
    "arrow.flight.protocol.FlightService/DoGet",
    "arrow.flight.protocol.FlightService/ListActions",
    "arrow.flight.protocol.FlightService/ListFlights",
    "arrow.flight.protocol.FlightService/GetFlightInfo",
)
"""Methods of each of Ray's services and of Arrow Flight. A port serves some of them, and does not know the others."""
UNKNOWN = ("UNIMPLEMENTED", "UNAVAILABLE")
REFUSED = frozenset({"UNAUTHENTICATED"})
PATHS = ("/", "/metrics", "/get_or_create_runtime_env", "/api/version", "/logs", "/api/jobs/")
"""Pages of Ray's web servers, and of others."""
GET = b"GET %s HTTP/1.0\r\n\r\n"
COUNTERS = "counters for Prometheus"
WRONG_TOKEN = [("authorization", f"Bearer {'0' * 64}")]
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a client that speaks HTTP/2: the preface, and settings."""
ZMQ = b"\xff"
"""The first byte that a socket of ZeroMQ says by itself."""
TCP_STORE = struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BI", 13, 4711)
"""What a client of torch's TCPStore says first, and a ping."""
HEAR_S, CALL_S = 0.5, 5.0
ENOUGH = 4096
OF_PROCESSES = ("environ", "mem", "maps", "map_files", "fd", "cwd", "root", "auxv")
"""What the system shows of a process to its user alone."""
NUM_FLOOD = 300


def become(uid: int) -> None:
    """Give up all rights of this process for those of a user without groups."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    with suppress(PermissionError):
        os.setuid(0)
        raise RuntimeError("this process still has the rights of root")


# -- files and processes -----------------------------------------------------------------------------------------------


def try_path(path: str) -> Iterable[Found]:
    """Try to read, list, write, fill or call what has this name."""
    with suppress(OSError), closing(_Descriptor(path, os.O_RDONLY)) as opened:
        yield ("listed", path, "") if Path(path).is_dir() else ("read", path, os.read(opened.fd, 20).hex())
    with suppress(OSError), closing(_Descriptor(path, os.O_WRONLY)):
        yield "wrote", path, ""
    mine = f"{path}/.of-another-user"
    with suppress(OSError), closing(_Descriptor(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL)):
        yield "filled", path, ""
        Path(mine).unlink()
    yield from _try_unix(path, path)


class _Descriptor:
    """An open file, without a modification of it."""

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self.fd)


def _try_unix(address: str, name: str) -> Iterable[Found]:
    with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as unix:
        unix.settimeout(CALL_S)
        unix.connect(address)
        yield "connected", name, ""


def try_abstract(name: str) -> Iterable[Found]:
    """Try to connect to a Unix socket without a file."""
    yield from _try_unix(f"\0{name}", f"@{name}")


def try_process(pid: int, secrets: Sequence[str]) -> Iterable[Found]:
    """Try to look into a process, to signal it, and to find secrets in what every user sees of it."""
    for name in OF_PROCESSES:
        place = f"/proc/{pid}/{name}"
        with suppress(OSError):
            yield "read", place, str(Path(place).readlink() if name in ("cwd", "root") else _content(place))
    with suppress(OSError):
        os.kill(pid, 0)
        yield "signalled", str(pid), ""
    for name in ("cmdline", "comm"):
        with suppress(OSError):
            shown = Path(f"/proc/{pid}/{name}").read_bytes()
            if any(secret.encode() in shown for secret in secrets):
                yield "shown", f"/proc/{pid}/{name}", ""


def _content(place: str) -> object:
    if Path(place).is_dir():
        return len(list(Path(place).iterdir()))
    with Path(place).open("rb") as file:
        return file.read(20)


# -- ports -------------------------------------------------------------------------------------------------------------


def try_port(host: str, port: int) -> Iterable[Found]:
    """Try to call what listens at an address, in the languages of all that a run starts."""
    where = f"{host}:{port}"
    first = say(host, port, b"")
    if first.startswith(ZMQ):
        yield "called", where, f"ZeroMQ: {first[:10]!r}"
        return
    if _is_http2(first) or _is_http2(say(host, port, HTTP2)):
        for metadata in ([], WRONG_TOKEN):
            if said := answers(where, metadata) - REFUSED:
                yield "called", where, f"gRPC: {', '.join(sorted(said))}"
        return
    if say(host, port, GET % b"/", CALL_S).startswith(b"HTTP/1"):
        yield from (("called", where, said) for said in sorted({web_page(host, port, path) for path in PATHS} - {""}))
        return
    for words in (TCP_STORE, *(struct.pack("<q", number) for number in range(4)), os.urandom(64)):
        if said := say(host, port, words):
            yield "called", where, f"{said[:20]!r}"


def say(host: str, port: int, words: bytes, hear_s: float = HEAR_S) -> bytes:
    """Return the first bytes that come back over a new connection."""
    said = b""
    with suppress(OSError), socket.create_connection((host, port), timeout=CALL_S) as connection:
        connection.sendall(words)
        connection.settimeout(hear_s)
        while len(said) < ENOUGH and (more := connection.recv(ENOUGH)):
            said += more
            connection.settimeout(HEAR_S)
    return said


def _is_http2(said: bytes) -> bool:
    """Return True for a frame of settings, with which a server of HTTP/2 begins."""
    return len(said) >= 9 and said[3:5] == b"\x04\x00" and not any(said[5:9])


def answers(where: str, metadata: Sequence[tuple[str, str]]) -> set[str]:
    """Return how an address answers calls of gRPC's methods, but for those that it does not know."""
    found = set()
    with grpc.insecure_channel(where, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        for method in METHODS:
            try:
                list(channel.unary_stream(f"/{method}")(b"", timeout=CALL_S, metadata=metadata))
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found - set(UNKNOWN)


def web_page(host: str, port: int, path: str) -> str:
    """Return what a web server shows to a request without a token, in short: an empty text if there is no such page, or
    none without a token."""
    head, _, body = say(host, port, GET % path.encode(), CALL_S).partition(b"\r\n\r\n")
    status = head.split()[1].decode() if head else "broken off"
    if status in ("401", "404"):
        return ""
    return COUNTERS if body.startswith(b"# HELP ") else f"{status}: {body[:50]!r}"


def flood(host: str, port: int) -> None:
    """Open many connections that say nothing, and call without a token; hold them until a line can be read."""
    silent = [socket.create_connection((host, port), timeout=CALL_S) for _ in range(NUM_FLOOD)]
    channels = [
        grpc.insecure_channel(f"{host}:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(20)
    ]
    calls = [
        channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange")(iter(()), timeout=600)
        for channel in channels
        for _ in range(NUM_FLOOD // 20)
    ]
    print(json.dumps("flooding"), flush=True)
    sys.stdin.readline()
    for call in calls:
        call.cancel()
    for one in (*channels, *silent):
        one.close()


def try_all(targets: Targets) -> list[Found]:
    """Try everything, several at a time, and return what could be done."""
    tries: list[Callable[[], Iterable[Found]]] = [
        *(lambda path=path: try_path(path) for path in targets.paths),
        *(lambda pid=pid: try_process(pid, targets.secrets) for pid in targets.pids),
        *(lambda name=name: try_abstract(name) for name in targets.abstract),
        *(lambda host=host, port=port: try_port(host, port) for host, port in targets.ports),
    ]
    with ThreadPoolExecutor(48) as pool:
        return [found for done in pool.map(lambda attempt: list(attempt()), tries) for found in done]


def main() -> None:
    targets = Targets(**json.loads(sys.stdin.readline()))
    list(try_port("127.0.0.1", 0))  # imports what is imported late
    answers("127.0.0.1:0", [])
    if targets.uid is not None:
        become(targets.uid)
    found = try_all(targets)
    if targets.flood is not None:
        flood(*targets.flood)
    print(json.dumps(found), flush=True)


@contextmanager
def trying(targets: Targets) -> Iterator[subprocess.Popen[str]]:
    """Run this program during a `with` block. `found_by` takes what it found."""
    command = [sys.executable, "-m", "tests.yatt_mm.whole_runs.other_user"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(targets)) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def found_by(process: subprocess.Popen[str]) -> set[Found]:
    """Return what the program found, when it has ended."""
    output, _ = process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 0
    return {(did, what, got) for did, what, got in json.loads(output.splitlines()[-1])}


if __name__ == "__main__":
    main()
