"""Sends malformed requests over bare gRPC or TCP and judges the replies. It runs in a process of its own.

A good reply is a success or a Flight error with a message. Findings are: a bug in the node, its death, and a call that
outlives its deadline. Everything that the node may have kept is given back at the end.
"""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from benchmarks.fuzzing.requests import KEPT, SESSION, Corpus, Known
from benchmarks.fuzzing.wire import SERVICE, Request, action, command, fields_of, flight_data

DEADLINE_S = 20.0
NUM_AT_ONCE = 12
PER_SESSION = 500
"""The number of requests between two sessions (and two connections) of a worker."""
NUM_HALF_OPEN = 8
MAX_FINDINGS = 50

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_BUG = re.compile(r"(do|list|get)_\w+: \w+:|Unexpected <class|Traceback|Error: \(|<class '|Unknown error")
"""A pattern for the text of a bug, as opposed to the text of a refusal."""

_GRPC_OWN = {"INTERNAL", "UNIMPLEMENTED"}
"""The status codes with which gRPC itself, without a text, refuses bytes that are no protobuf message and methods that
do not exist."""


@dataclass(slots=True)
class Tally:
    """The results of a worker."""

    num_sent: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    slowest: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)
    """One error text for each (method, code, first words), for people to read."""

    def add(self, request: Request, code: str, text: str, seconds: float) -> None:
        """Count a reply, and keep it if it is a finding."""
        self.num_sent += 1
        self.codes[code] = self.codes.get(code, 0) + 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, f"{request.index} ({request.how})"
        words = " ".join(text.split()[:3])[:40]
        self.samples.setdefault(f"{request.method.split('/')[-1]} {code} {words}", text[:300])
        if request.method.endswith(("GetSchema", "GetFlightInfo")):
            text = text.split(". Detail: Python exception")[0]  # pyarrow adds the traceback of what these two refuse
        why = _why(code, text, seconds)
        if why and len(self.findings) < MAX_FINDINGS:
            shown = f"{code}: {text[:500]}"
            self.findings.append({"index": request.index, "how": request.how, "why": why, "text": shown})


class Worker:
    """Sends a share of the requests, a dozen at a time."""

    def __init__(self, uri: str, known: Known, seed: int) -> None:
        self._address = uri.removeprefix("grpc://")
        self._corpus = Corpus(known, seed)
        self._names: set[str] = set()
        """The leases that GetFlightInfo gave."""
        self._token = b""
        self._lock = threading.Lock()
        self.tally = Tally()

    def run(self, indices: Iterable[int], said: Callable[[int], None]) -> None:
        """Send the requests with these numbers; `said` is called after each."""
        rest = list(indices)
        half_open = [self._connect() for _ in range(NUM_HALF_OPEN)]
        while rest:
            now, rest = rest[:PER_SESSION], rest[PER_SESSION:]
            with grpc.insecure_channel(self._address, options=_OPTIONS) as channel:
                with self._session(channel):
                    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                        for _ in pool.map(lambda index: self._send(channel, self._corpus.request(index)), now):
                            said(1)
                self._give_back(channel)
        for connection in half_open:
            connection.close()

    @contextlib.contextmanager
    def _session(self, channel: grpc.Channel) -> Iterator[None]:
        """Keep a good session open, whose token the requests may misuse."""
        done = threading.Event()

        def said() -> Iterator[bytes]:
            yield flight_data(command(b'{"verb": "session"}'))
            done.wait(600)

        call = channel.stream_stream(f"{SERVICE}DoExchange")(said(), timeout=600)
        self._token = str(json.loads(dict(fields_of(next(call)))[3])["session"]).encode()
        try:
            yield
        finally:
            done.set()
            with contextlib.suppress(grpc.RpcError):
                list(call)

    def _send(self, channel: grpc.Channel, request: Request) -> None:
        started = time.monotonic()
        code, text = self._call(channel, request) if request.method else self._tcp(request)
        seconds = time.monotonic() - started
        with self._lock:
            self._names.update(request.leaves)
            self.tally.add(request, code, text, seconds)

    def _call(self, channel: grpc.Channel, request: Request) -> tuple[str, str]:
        token = self._token[: len(SESSION)].ljust(len(SESSION))
        is_made = threading.Event()

        def said() -> Iterator[bytes]:
            for sent in request.messages:
                yield sent.replace(SESSION.encode(), token)
            if request.ending == "cancel" and is_made.wait(DEADLINE_S):
                call.cancel()

        call = channel.stream_stream(request.method)(said(), timeout=DEADLINE_S)
        is_made.set()
        try:
            for answer in call:
                with self._lock:
                    self._names.update(_names_in(answer))
                if request.ending == "drop":
                    call.cancel()
        except grpc.RpcError:
            pass
        return call.code().name, str(call.details() or "")

    def _connect(self) -> socket.socket:
        host, port = self._address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=DEADLINE_S)

    def _tcp(self, request: Request) -> tuple[str, str]:
        """Send bytes on a bare connection; the node may answer, close, or wait for more. Return a code and a text that
        say how the connection ended."""
        try:
            with self._connect() as connection:
                connection.sendall(request.messages[0])
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    connection.recv(4096)
        except ConnectionRefusedError:
            return "UNAVAILABLE", "connection refused"
        except OSError:
            return "CLOSED", "by the node"
        return "TCP", "sent"

    def _give_back(self, channel: grpc.Channel) -> None:
        """Release and close whatever the requests so far may have made."""
        names = sorted(self._names - {KEPT})
        self._names.clear()
        for start in range(0, len(names), 200):
            _act(channel, "release", {"names": names[start : start + 200]})
        if "close_scope" in self._corpus.verbs:
            for name in names:
                _act(channel, "close_scope", {"name": name})


def _act(channel: grpc.Channel, verb: str, body: dict[str, Any]) -> None:
    """Run one good action. A refusal is fine, because most scopes were never opened."""
    call = channel.stream_stream(f"{SERVICE}DoAction")
    with contextlib.suppress(grpc.RpcError):
        list(call(iter([action(verb, json.dumps(body).encode())]), timeout=DEADLINE_S))


def _why(code: str, text: str, seconds: float) -> str:
    """Return what is wrong with a reply; empty if nothing is. A deadline error that the node itself sends in time is
    not wrong."""
    if code == "DEADLINE_EXCEEDED" and seconds >= DEADLINE_S:
        return f"no answer in {DEADLINE_S:g} s"
    if code == "UNAVAILABLE":
        return "the node was not there"
    if code in ("OK", "CANCELLED", "CLOSED", "TCP") or (code in _GRPC_OWN and not text):
        return ""
    return "the answer is a bug's, or says nothing" if _BUG.search(text) or not text else ""


def _names_in(answer: bytes) -> set[str]:
    """Return the names of the refs in a reply of the node. They are in protobuf field 1 of a reply to DoPut, and in
    field 3 of a message of a put stream."""
    found = set()
    with contextlib.suppress(ValueError, IndexError):
        for _, value in fields_of(answer):
            if value[:1] == b"{":
                body = json.loads(value)
                if isinstance(body.get("name"), str):
                    found.add(body["name"])
    return found


def run_worker(uri: str, known: dict[str, Any], seed: int, indices: range, out: Any) -> None:
    """Send the requests numbered `indices`, and put findings and counts into the queue `out`. The main function of a
    worker process."""
    worker = Worker(uri, Known(**known), seed)
    try:
        worker.run(indices, out.put)
    except Exception as error:
        finding = {"index": -1, "how": "", "why": f"the worker failed: {error!r}", "text": ""}
        worker.tally.findings.append(finding)
    out.put(asdict(worker.tally))
