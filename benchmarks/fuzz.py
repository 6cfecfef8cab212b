"""Sends malformed Flight requests to a real node and checks that it does not crash, hang, grow or leave anything
behind.

    python benchmarks/fuzz.py [--requests 100000] [--seed 0] [--json]
    python benchmarks/fuzz.py --seed 0 --only 4711      # send one request again and print it

The node is a process of its own, and fetches an object from another node. Two other processes send requests, a dozen at
a time. The exit code is 1 if there is a finding.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fuzzing.client import run_worker
from benchmarks.fuzzing.node import MEMORY_BYTES, FuzzedNode, Usage
from benchmarks.fuzzing.requests import Corpus, Known
from dataplane.client.client import Client
from dataplane.client.connect import connect
from dataplane.client.reader import Reader
from dataplane.core.errors import DataPlaneError
from dataplane.core.refs import Ref
from tests.dataplane.shards import RECIPE, wait_until

REMOTE, REMOTE_BYTES = "fuzz/remote", 100_000
"""The name and size of an object that the node must fetch from another node."""
MAX_GROWTH_BYTES = 20 << 20
WARM_UP_FRAC = 0.1
"""The share of the requests after whose replies the node's growth is measured."""
NUM_WORKERS = 2
MAX_SHOWN = 20
STALL_S = 120.0
"""The time in seconds without any reply that counts as a hang of node or client."""


def known_of(uri: str, home_uri: str | None = None) -> Known:
    """Return the objects that good requests name: two derived objects, a source and a plain object, which stay during
    the fuzzing, and an object of another node if `home_uri` gives one."""
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(Client(uri))
        remote = []
        if home_uri is not None:
            home = opened.enter_context(Client(home_uri))
            remote.append(home.put(np.arange(REMOTE_BYTES, dtype=np.uint8), name=REMOTE).to_dict())
        client.ingest("good")
        sources = [sample.media[0] for sample in client.samples("good", [0, 1])]
        made = [ref.to_dict() for ref in client.derive(sources, RECIPE) if isinstance(ref, Ref)]
        client.put(np.arange(256, dtype=np.uint8), name="fuzz/kept")
        with contextlib.closing(connect(uri)) as flight:
            actions = {action.type: action.description for action in flight.list_actions()}
        refs = [*made, sources[0].to_dict(), *remote]
        return Known(actions=actions, refs=refs, recipe=dict(RECIPE), dataset="good")


def listed(uri: str) -> list[str]:
    """Return the names of the objects that the node holds, in memory or on disk."""
    with contextlib.closing(connect(uri)) as flight:
        return [flight_info.descriptor.path[0].decode() for flight_info in flight.list_flights(b"")]


def good_requests_work(uri: str, known: Known) -> str:
    """Check that every kind of good request works, and that all counters return to zero. Return what is wrong, or an
    empty string."""
    remote = [Ref.from_dict(ref) for ref in known.refs if ref["name"] == REMOTE]
    try:
        with Client(uri, timeout_s=20) as client, Reader(uri, timeout_s=20) as reader:
            sources = [sample.media[0] for sample in client.samples("good", range(8))]
            made = [ref for ref in client.derive(sources, RECIPE) if isinstance(ref, Ref)]
            small = client.put(b"x" * 1000, name="fuzz/after")
            assert len(made) == 8 and all(view.any() for view in reader.resolve([*made, small])), "wrong views"
            assert client.get(small) == b"x" * 1000, "wrong bytes"
            client.release(remote)  # it is fetched once more
            assert all(view.nbytes == REMOTE_BYTES for view in reader.resolve(remote)), "no object of the home"
            client.release_names(["fuzz/after", "fuzz/kept", REMOTE])
        with Client(uri, timeout_s=20) as client:
            wait_until(lambda: client.stat()["num_leases"] == client.stat()["num_readers"] == 0)
            whole = client.put(bytes(MEMORY_BYTES), name="fuzz/whole")  # fits only if every slab is back
            client.release([whole])
            stat = client.stat()
        stat["plain"] = [name for name in listed(uri) if not name.startswith(("s/", "d/"))]
    except (DataPlaneError, AssertionError) as error:
        with contextlib.suppress(DataPlaneError), Client(uri, timeout_s=5) as client:
            return f"after the fuzzing: {error}; {client.stat()}"
        return f"after the fuzzing: {error}"
    left = {key: stat[key] for key in ("used_bytes", "num_leases", "num_readers", "num_scopes", "plain")}
    return f"left behind: {left}" if any(left.values()) else ""


def fuzz(num_requests: int, seed: int, console: Console) -> dict[str, Any]:
    """Start the node, send the requests, measure and check. Return the report, JSON-safe; `findings` is empty if
    nothing is wrong."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        node = FuzzedNode(Path(folder))
        started = time.monotonic()
        try:
            known = known_of(node.uri, node.home.uri)
            num_warm = int(WARM_UP_FRAC * num_requests)
            tallies, _ = _send(node, known, range(num_warm), seed, console)
            usages = [node.settled_usage()]
            if node.process.poll() is None:
                more, while_busy = _send(node, known, range(num_warm, num_requests), seed, console)
                tallies, usages = tallies + more, usages + while_busy
            seconds = time.monotonic() - started
            wrong = good_requests_work(node.uri, known) if node.process.poll() is None else ""
            usages.append(node.settled_usage())
        finally:
            code = node.stop()
        findings = [finding for tally in tallies for finding in tally["findings"]]
        return _report(num_requests, seed, seconds, tallies, usages, findings + _state(node, code, wrong, usages))


def _send(
    node: FuzzedNode, known: Known, indices: range, seed: int, console: Console
) -> tuple[list[dict[str, Any]], list[Usage]]:
    """Send the requests with these numbers. Return the workers' tallies, and the node's usage after each tenth."""
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    workers = [
        context.Process(target=run_worker, args=(node.uri, asdict(known), seed, indices[at::NUM_WORKERS], out))
        for at in range(NUM_WORKERS)
    ]
    for worker in workers:
        worker.start()
    tallies: list[dict[str, Any]] = []
    usages: list[Usage] = []
    done = 0
    columns = (TextColumn("{task.description}"), TaskProgressColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("fuzzing", total=len(indices))
            for said in _said(out, workers):
                if isinstance(said, dict):
                    tallies.append(said)
                    if len(tallies) == NUM_WORKERS:
                        break
                    continue
                done += said
                progress.update(bar, completed=done)
                if done >= (len(usages) + 1) * len(indices) / 10:
                    usages.append(node.usage())
                if done % 100 == 0 and node.process.poll() is not None:
                    break
    finally:
        for worker in workers:
            worker.join(5 if tallies else 0)
            worker.kill()
            worker.join()
    return tallies, usages


def _said(out: Any, workers: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of the workers until all of them have ended, or none sent a result for too long."""
    last = time.monotonic()
    while time.monotonic() - last < STALL_S:
        try:
            yield out.get(timeout=1)
            last = time.monotonic()
        except Empty:
            if not any(worker.is_alive() for worker in workers):
                return


def _state(node: FuzzedNode, code: int, wrong: str, usages: Sequence[Usage]) -> list[dict[str, Any]]:
    """Return the findings about the node as a whole."""
    found = []
    log = node.log()
    if code:
        found.append({"why": f"the node ended with code {code}", "text": log[-3000:]})
    if "Traceback" in log:
        found.append({"why": f"{log.count('Traceback')} tracebacks in the node's log", "text": log[:6000]})
    if node.files():
        found.append({"why": f"files are left: {node.files()[:5]}", "text": ""})
    if wrong:
        found.append({"why": wrong, "text": ""})
    grown = usages[-1].resident_bytes - usages[0].resident_bytes
    if grown > MAX_GROWTH_BYTES:
        found.append({"why": f"the node grew by {grown >> 20} MiB after the warm-up", "text": ""})
    if usages[-1].num_threads > usages[0].num_threads + 8:
        found.append({"why": f"threads went from {usages[0].num_threads} to {usages[-1].num_threads}", "text": ""})
    return [{"index": -1, "how": "", **finding} for finding in found]


def _report(
    num_requests: int,
    seed: int,
    seconds: float,
    tallies: Sequence[dict[str, Any]],
    usages: Sequence[Usage],
    findings: list[dict[str, Any]],
) -> dict[str, Any]:
    codes: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for tally in tallies:
        codes.update(tally["codes"])
        samples |= tally["samples"]
    num_sent = sum(tally["num_sent"] for tally in tallies)
    if num_sent < num_requests:
        findings.append({"index": -1, "how": "", "why": f"only {num_sent} of {num_requests} were answered", "text": ""})
    slowest = max(tallies, key=lambda tally: tally["slowest_s"], default={"slowest_s": 0.0, "slowest": ""})
    return {
        "num_requests": num_sent,
        "seed": seed,
        "seconds": round(seconds, 1),
        "slowest_s": round(slowest["slowest_s"], 3),
        "slowest": slowest["slowest"],
        "codes": dict(codes.most_common()),
        "resident_mib": [round(usage.resident_bytes / (1 << 20), 1) for usage in usages],
        "warm": asdict(usages[0]),
        "end": asdict(usages[-1]),
        "samples": samples,
        "findings": findings,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report for people."""
    table = Table("what", "found", title=f"{report['num_requests']:,} malformed requests, seed {report['seed']}")
    table.add_row("time", f"{report['seconds']:,} s")
    table.add_row("slowest answer", f"{report['slowest_s']} s, request {report['slowest']}")
    table.add_row("answers", ", ".join(f"{count:,} {code}" for code, count in report["codes"].items()))
    for key in ("warm", "end"):
        usage = report[key]
        text = (
            f"{usage['resident_bytes'] / (1 << 20):.1f} MiB, {usage['num_threads']} threads, {usage['num_fds']} files"
        )
        table.add_row(f"node, {key}", text)
    table.add_row("findings", str(len(report["findings"])))
    console.print(table)
    for finding in report["findings"][:MAX_SHOWN]:
        console.print(f"{finding['index']} ({finding['how']}): {finding['why']}\n    {finding['text']}", markup=False)


def send_one(seed: int, index: int, console: Console) -> list[dict[str, Any]]:
    """Send one request to a fresh node and print it. Return the findings."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        node = FuzzedNode(Path(folder))
        try:
            known = known_of(node.uri, node.home.uri)
            console.print(Corpus(known, seed).request(index), markup=False)
            out: Any = multiprocessing.get_context("spawn").Queue()
            run_worker(node.uri, asdict(known), seed, range(index, index + 1), out)
            tally = next(said for said in iter(lambda: out.get(timeout=60), None) if isinstance(said, dict))
        finally:
            code = node.stop()
        console.print(tally["codes"], tally["samples"], f"\nnode: {code or 'alive'}\n{node.log()}", markup=False)
        return [*tally["findings"], *([] if not code else [{"why": f"node ended with {code}"}])]


def main() -> int:
    """Fuzz and print. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="send nothing but the request of this number, and print it")
    parser.add_argument("--json", action="store_true", help="end with one line for machines")
    args = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    console = Console(stderr=args.json)
    if args.only is not None:
        return int(bool(send_one(args.seed, args.only, console)))
    report = fuzz(args.requests, args.seed, console)
    show(report, console)
    if args.json:
        print(json.dumps(report))
    return int(bool(report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
