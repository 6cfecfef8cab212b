"""Runs writers, readers, eviction, scopes and random `kill -9` of clients and of the node, and checks for wrong bytes,
leaks and hangs.

    python benchmarks/soak.py [--minutes 10] [--seed 0] [--json]

Four writers and four readers use a node whose arena is much smaller than what they request. Every view is compared with
its digest when it is made and just before it is dropped. At the end everything is released, and all counters must be
back at zero. The exit code is 1 if there is a finding.
"""

import argparse
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.soaking.catalog import Catalog
from benchmarks.soaking.workers import HANG_S, run_worker
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import DataPlaneError
from dataplane.core.refs import Ref
from dataplane.storage.arena import PREFIX, SHM_DIR
from tests.dataplane.shards import encode, has_ended, noise, write_shard

NUM_WRITERS = NUM_READERS = 4
CLIENT_KILL_S = 4.0
NODE_KILL_S = 25.0
"""The mean time in seconds between two kills."""
FIRST_NODE_KILL_S = 25.0
"""The time in seconds before the first kill of the node, or half of a short soak."""
STOP_S = 60.0
IMAGE_EDGE = 252

_spawn = get_context("spawn")


@dataclass(slots=True)
class Worker:
    """A child process, and what is known about it."""

    role: str
    name: str
    process: Any
    pipe: connection.Connection
    heard: float
    is_done: bool = False


class Soak:
    """Starts, feeds, kills and replaces workers; kills the node; judges the reports."""

    def __init__(self, node: EmbeddedNode, seed: int, num_samples: int) -> None:
        self._node = node
        self._rng = random.Random(seed)
        self._seed = seed
        self._num_samples = num_samples
        self._workers: list[Worker] = []
        self._num_started = 0
        self.catalog = Catalog(self._rng)
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self.processes: set[psutil.Process] = set()
        """Every process that was started, including that of the node."""
        self._last_stat: dict[str, Any] = {}
        self._is_restarting = False
        self._orphans: list[str] = []
        """The objects that killed writers stored and no process will release."""

    def run(self, seconds: float, progress: Progress, until: Mapping[str, int]) -> None:
        """Run until the time is over, or every count of `until` is reached, and every worker has ended."""
        bar = progress.add_task("soaking", total=seconds)
        for at in range(NUM_WRITERS + NUM_READERS):
            self._start("writer" if at < NUM_WRITERS else "reader")
        started = time.monotonic()
        next_client, next_stat = started + CLIENT_KILL_S, started
        next_node = started + min(FIRST_NODE_KILL_S, seconds / 2)
        while (now := time.monotonic()) < started + seconds and len(self.findings) < 20:
            self._hear(0.1)
            if until and all(self.counts[name] >= least for name, least in until.items()):
                break
            if now > next_client:
                next_client = now + self._rng.uniform(0.5, 1.5) * CLIENT_KILL_S
                self._kill_client()
            if now > next_node and not self._is_restarting:
                next_node = now + self._rng.uniform(0.7, 1.3) * NODE_KILL_S
                self._kill_node()
            if now > next_stat:
                next_stat = now + 1
                self._look_after_node()
                progress.update(bar, completed=now - started)
        self._stop()

    def _start(self, role: str) -> None:
        self._num_started += 1
        ours, theirs = _spawn.Pipe()
        name = f"{role}-{self._seed}-{self._num_started}"
        args = (role, name, self._node.uri, theirs, self._num_samples)
        process = _spawn.Process(target=run_worker, args=args, daemon=True)
        process.start()
        theirs.close()
        self.processes.add(psutil.Process(process.pid))
        self._workers.append(Worker(role, name, process, ours, time.monotonic()))

    def _hear(self, timeout_s: float) -> None:
        """Handle all reports of workers, and their ends."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in connection.wait(list(by_pipe), timeout_s):
            self._hear_one(by_pipe[pipe])  # type: ignore[index]
        now = time.monotonic()
        for worker in self._workers:
            if now - worker.heard > HANG_S + 15:
                self.findings.append(f"{worker.name} was silent for {HANG_S + 15:g} s")
                worker.process.kill()
                worker.heard = now

    def _hear_one(self, worker: Worker) -> None:
        worker.heard = time.monotonic()
        try:
            while worker.pipe.poll():
                kind, value = worker.pipe.recv()
                self._understand(worker, kind, value)
        except (EOFError, OSError):
            worker.pipe.close()
            worker.process.join(STOP_S)
            self._workers.remove(worker)
            self._orphans += self.catalog.writer_ended(worker.name)
            if not worker.is_done and worker.process.exitcode != -signal.SIGKILL:
                self.findings.append(f"{worker.name} ended with {worker.process.exitcode}")
                if not self.catalog.is_closed:
                    self._start(worker.role)  # a soak without writers would show nothing

    def _understand(self, worker: Worker, kind: str, value: Any) -> None:
        match kind:
            case "count":
                self.counts.update(value)
            case "want":
                worker.pipe.send(self.catalog.pick(value))
            case "wrong":
                self.findings.append(value)
            case "done":
                worker.is_done = True
            case _:
                self.catalog.note(worker.name, kind, value)

    def _kill_client(self) -> None:
        victim = self._rng.choice(self._workers)
        victim.process.kill()
        self.counts["num_client_kills"] += 1
        victim.process.join(STOP_S)
        self._hear_one_to_the_end(victim)
        self._start(victim.role)

    def _hear_one_to_the_end(self, worker: Worker) -> None:
        while worker in self._workers:
            self._hear_one(worker)

    def _kill_node(self) -> None:
        pid = self._node.pid
        self.processes |= family(pid)
        os.kill(pid, signal.SIGKILL)  # our own child, which has answered since the last kill
        self._is_restarting = True
        self.catalog.node_killed()
        self.counts["num_node_kills"] += 1

    def _look_after_node(self) -> None:
        """Count the node's evictions, and release what killed writers left."""
        try:
            with Client(self._node.uri, timeout_s=2) as client:
                stat = client.stat()
                client.release_names(self._orphans)
                self._orphans = []
        except DataPlaneError:
            return  # it is being restarted
        self._is_restarting = False
        last = self._last_stat if self._last_stat.get("incarnation") == stat.get("incarnation") else {}
        for key in ("num_evicted", "num_recomputed"):
            self.counts[key] += stat[key] - last.get(key, 0)
        self.counts["max_spilled"] = max(self.counts["max_spilled"], stat["num_spilled"])
        self._last_stat = stat

    def _stop(self) -> None:
        """Tell every worker to stop, and wait for it."""
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            if worker.role == "writer":
                worker.pipe.send("stop")
        self.catalog.is_closed = True
        while self._workers and time.monotonic() < deadline:
            self._hear(0.1)
        for worker in self._workers:
            self.findings.append(f"{worker.name} did not stop in {STOP_S:g} s")
            worker.process.kill()
            worker.process.join()


def family(pid: int) -> set[psutil.Process]:
    """Return the running processes among a process and its descendants. Another process that gets one of their numbers
    later is not counted."""
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def unreadable(node: EmbeddedNode, durable: list[dict[str, Any]]) -> list[str]:
    """Return acknowledged durable objects that cannot be read any more, or have other bytes."""
    found = []
    with Reader(node.uri) as reader:
        for ref in map(Ref.from_dict, durable):
            try:
                (view,) = reader.resolve([ref])
                if content_digest(view.reshape(-1).data) != ref.meta["checksum"]:
                    found.append(f"durable {ref.name} holds other bytes")
            except DataPlaneError as error:
                found.append(f"durable {ref.name} is lost: {error}")
    return found


def segments_of(node_id: str) -> list[str]:
    """Return the names of the shared-memory files that a node made, from each time that it was started."""
    return [path.name for path in SHM_DIR.glob(f"{PREFIX}*-{node_id}-*")]


def leaks(node: EmbeddedNode, soak: Soak, memory_bytes: int) -> list[str]:
    """Return what is left after everything was released."""
    with Client(node.uri, timeout_s=30) as client:
        client.release_names(soak.catalog.all_names())
        deadline = time.monotonic() + 60  # scopes of killed writers close half a minute after them
        zero = ("num_leases", "num_readers", "num_scopes", "leased_bytes")
        while any((stat := client.stat()).get(key, 0) for key in zero) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = {key: stat[key] for key in zero if stat.get(key, 0)}
        try:
            client.release([client.put(bytes(memory_bytes), name="soak/whole")])  # fits only if every slab is back
        except DataPlaneError as error:
            return [f"left behind: {left} {error}"]
        used = client.stat()["used_bytes"]
    return [f"left behind: {left}, {used} bytes"] if left or used else []


def soak(
    seconds: float,
    seed: int,
    memory_bytes: int,
    spill_bytes: int,
    num_samples: int,
    console: Console,
    until: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run the whole soak, or until every count of `until` is reached. Return the report, JSON-safe; `findings` is empty
    if nothing is wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for shard in range(4):
            images = {
                f"{at:05d}": encode(noise(at, IMAGE_EDGE, IMAGE_EDGE), "PNG", compress_level=1)
                for at in range(shard, num_samples, 4)
            }
            write_shard(Path(folder) / f"soak-{shard:03d}.tar", images)
        roots, node_id = {"soak": [f"{folder}/soak-*.tar"]}, f"soak{secrets.token_hex(4)}"
        node = EmbeddedNode(
            memory_bytes=memory_bytes,
            roots=roots,
            num_workers=1,
            node_id=node_id,
            spill_dir=Path(folder) / "disk",
            spill_bytes=spill_bytes,
        )
        with node:
            with Client(node.uri) as client:
                client.ingest("soak")
            made = Soak(node, seed, num_samples)
            with Progress(console=console, transient=True) as progress:
                made.run(seconds, progress, until)
            findings = (
                made.findings
                + made.catalog.judge()
                + unreadable(node, made.catalog.durable())
                + leaks(node, made, memory_bytes)
            )
            if node.failure is not None:
                findings.append(f"the node was given up: {node.failure}")
            made.processes |= family(node.pid)
        findings += [f"{path} is left" for path in Path(folder).glob("disk/**/*.arrow")]
    findings += [f"segment {name} is left" for name in segments_of(node_id)]
    findings += [f"{process} is left" for process in made.processes if not has_ended(process)]
    mb_per_s = (made.counts["checked_bytes"] + made.counts["put_bytes"]) / seconds / 1e6
    counts = {key: made.counts[key] for key in sorted(made.counts)} | {"mb_per_s": round(mb_per_s, 1)}
    return {"seconds": seconds, "seed": seed, "memory_bytes": memory_bytes, "counts": counts, "findings": findings}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report for people."""
    table = Table("what", "count", title=f"{report['seconds']:g} s, seed {report['seed']}")
    for key, value in report["counts"].items():
        table.add_row(key, f"{value:,}")
    table.add_row("findings", str(len(report["findings"])))
    console.print(table)
    for finding in report["findings"][:20]:
        console.print(finding[:1000], markup=False)


def main() -> int:
    """Soak and print. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=96 << 20, help="bytes of the node's arena")
    parser.add_argument("--spill", type=int, default=128 << 20, help="bytes of the node's disk")
    parser.add_argument("--samples", type=int, default=400, help="images, of which patches are made")
    parser.add_argument("--json", action="store_true", help="end with one line for machines")
    args = parser.parse_args()
    console = Console(stderr=args.json)
    report = soak(args.minutes * 60, args.seed, args.memory, args.spill, args.samples, console)
    show(report, console)
    if args.json:
        print(json.dumps(report))
    return int(bool(report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
