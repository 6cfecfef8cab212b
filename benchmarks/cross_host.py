"""Measures what crosses the network between two hosts when 8 readers of one want the same 1,000 objects of the other,
and what happens when the link breaks.

    python benchmarks/cross_host.py [--json]

As root it makes two network namespaces joined by a veth pair, and removes exactly those again; the kernel's interface
counters say how many bytes host A sent. After that, and if namespaces are not allowed, two nodes on loopback with
different host ids stand for the hosts: a proxy breaks the connections, and TCP_INFO counts. Every view is compared with
the digest of the stored bytes. The link is also broken in the middle of a transfer, once for a while and once for good.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: this folder must not hide the package `dataplane`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.hosts import why_not_allowed
from benchmarks.common.links import Link, LoopbackLink, NamespaceLink
from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import DataPlaneError
from dataplane.core.refs import Ref

NUM_OBJECTS = 1000
NUM_READERS = 8
MEMORY = "768MiB"
CUT_BYTES = 192 << 20
START_TIMEOUT_S = 120.0
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one experiment."""

    path: str
    bytes: int
    count: int
    seconds: float
    sent_bytes: int
    """The number of bytes that host A sent, counted by the operating system."""
    outcome: str


def main() -> None:
    """Run every experiment and print a table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    parser.add_argument("--objects", type=int, default=NUM_OBJECTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(WORKERS[args.worker](json.load(sys.stdin))), flush=True)
        return
    rows = run(args.objects)
    show(rows)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


def run(num_objects: int) -> list[Row]:
    """Return the rows of every experiment over each kind of link."""
    links: list[NamespaceLink | LoopbackLink] = [LoopbackLink()]
    if not why_not_allowed():
        links.insert(0, NamespaceLink())
    return [row for link in links for row in rows_over(link, num_objects)]


def rows_over(link: NamespaceLink | LoopbackLink, num_objects: int) -> list[Row]:
    """Start nodes on two hosts, then run each experiment. Return the rows."""
    with ExitStack() as stack:
        stack.enter_context(link)
        stack.enter_context(_node(link, "a", []))
        stack.enter_context(_node(link, "b", [f"--peer=a={link.uri_of_a_for_b()}"]))
        return [
            readers_row(link, num_objects),
            cut_row(link, "cut for 2 s", 2.0, timeout_s=60.0),
            cut_row(link, "cut for good", None, timeout_s=12.0),
        ]


def readers_row(link: Link, num_objects: int) -> Row:
    """Check that each object crosses once, for any number of readers. Return the row."""
    refs = _worker(link, "a", "put", {"uri": link.uris["a"], "count": num_objects, "prefix": "mixed"})
    payload = sum(ref["nbytes"] for ref in refs)
    before, started = link.sent_bytes(), time.perf_counter()
    bodies = [{"uri": link.uris["b"], "refs": refs, "seed": seed, "timeout_s": 120.0} for seed in range(NUM_READERS)]
    processes = [_start(link, "b", "read", body) for body in bodies]
    results = [_result(process) for process in processes]
    seconds, sent = time.perf_counter() - started, link.sent_bytes() - before
    assert all(result["num_good"] == num_objects for result in results), results
    outcome = f"{NUM_READERS} readers, all digests right; sent {sent / payload:.3f} x payload"
    return Row(
        path=f"{link.name}: all read all",
        bytes=payload,
        count=num_objects,
        seconds=seconds,
        sent_bytes=sent,
        outcome=outcome,
    )


def cut_row(link: Link, path: str, mend_after_s: float | None, *, timeout_s: float) -> Row:
    """Break the link when a third of the bytes has crossed. Check that all views are right, or that there is an error
    and no view. Return the row."""
    body = {"uri": link.uris["a"], "count": 3, "prefix": path, "nbytes": CUT_BYTES // 3}
    refs = _worker(link, "a", "put", body)
    before, started = link.sent_bytes(), time.perf_counter()
    reading = _start(link, "b", "read", {"uri": link.uris["b"], "refs": refs, "seed": 0, "timeout_s": timeout_s})
    deadline = time.monotonic() + 60
    while link.sent_bytes() - before < CUT_BYTES // 3:
        if time.monotonic() > deadline or reading.poll() is not None:
            break
        time.sleep(0.002)  # a benchmark may look at the clock
    sent_at_cut = link.sent_bytes() - before
    link.cut()
    if mend_after_s is not None:
        time.sleep(mend_after_s)
        link.mend()
    result = _result(reading)
    seconds, sent = time.perf_counter() - started, link.sent_bytes() - before
    link.mend()
    assert result["num_good"] in (0, len(refs)), result
    said = "every digest right" if result["num_good"] else f"{result['error']}: no view"
    said = f"after {sent_at_cut >> 20} MiB; {said}"
    _worker(link, "a", "release", {"uri": link.uris["a"], "refs": refs})
    return Row(
        path=f"{link.name}: {path}",
        bytes=CUT_BYTES,
        count=len(refs),
        seconds=seconds,
        sent_bytes=sent,
        outcome=said,
    )


def put_objects(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Put objects of mixed sizes, 4 KiB to 1 MiB, with their digests in the meta. Return their refs as JSON. Runs in a
    process on host A."""
    rng = np.random.default_rng(7)
    with Client(body["uri"]) as client:
        refs = []
        for at in range(body["count"]):
            size = body.get("nbytes") or int(2 ** rng.uniform(12, 20))
            data = rng.integers(0, 256, size, dtype=np.uint8)
            ref = client.put(data, name=f"{body['prefix']}/{at}", meta={"digest": content_digest(data)})
            refs.append(ref.to_dict())
        return refs


def read_objects(body: dict[str, Any]) -> dict[str, Any]:
    """Resolve objects in a random order, and compare every view with its digest. Return the counts. Runs in a process
    on host B."""
    refs = [Ref.from_dict(ref) for ref in body["refs"]]
    order = np.random.default_rng(body["seed"]).permutation(len(refs))
    try:
        with Reader(body["uri"], timeout_s=body["timeout_s"]) as reader:
            views = reader.resolve([refs[at] for at in order])
            good = [content_digest(view.data) == refs[at].meta["digest"] for view, at in zip(views, order, strict=True)]
            assert all(good), f"{good.count(False)} views hold other bytes than were put"
            return {"num_good": sum(good), "error": ""}
    except DataPlaneError as error:
        return {"num_good": 0, "error": type(error).__name__}


def release_objects(body: dict[str, Any]) -> int:
    """Release the objects and return their number. Runs in a process on host A."""
    with Client(body["uri"]) as client:
        return client.release([Ref.from_dict(ref) for ref in body["refs"]])


WORKERS = {"put": put_objects, "read": read_objects, "release": release_objects}


@contextmanager
def _node(link: Link, name: str, more: Sequence[str]) -> Iterator[None]:
    """Run a node in its namespace during a `with` block, and wait until it serves."""
    command = [*link.prefix(name), sys.executable, "-m", "dataplane", "serve", "--node-id", name]
    link.host_ids[name] = f"cross-{name}-{secrets.token_hex(2)}"
    command += ["--host-id", link.host_ids[name], "--host", link.address(name), "--port", "0"]
    command += ["--memory", MEMORY, *more]
    command += ["--insecure"] if link.is_insecure else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "serving at" not in line:
            raise RuntimeError(f"node {name} did not start: {line!r}")
        timer.cancel()
        link.uris[name] = line.split("serving at ")[1].split()[0]
        yield
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(link: Link, host: str, verb: str, body: dict[str, Any]) -> "subprocess.Popen[str]":
    """Start a process on a host that does one task, and return it."""
    command = [*link.prefix(host), sys.executable, "-m", "benchmarks.cross_host", "--worker", verb]
    environ = os.environ | {"DATAPLANE_HOST_ID": link.host_ids[host]}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environ
    )
    assert process.stdin is not None
    with process.stdin:
        json.dump(body, process.stdin)
    return process


def _result(process: "subprocess.Popen[str]") -> Any:
    """Return the result that a process printed."""
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"a worker ended with code {process.returncode}; see above")
    return json.loads(text)


def _worker(link: Link, host: str, verb: str, body: dict[str, Any]) -> Any:
    return _result(_start(link, host, verb, body))


def show(rows: Sequence[Row]) -> None:
    """Print the table for people."""
    table = Table("experiment", "objects", "payload", "sent by A", "seconds", "outcome", title="between two hosts")
    for row in rows:
        sizes = [f"{size / (1 << 20):.1f} MiB" for size in (row.bytes, row.sent_bytes)]
        table.add_row(row.path, str(row.count), *sizes, f"{row.seconds:.2f}", row.outcome)
    Console().print(table)


if __name__ == "__main__":
    main()
