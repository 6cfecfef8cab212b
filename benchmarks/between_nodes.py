"""Measures a fetch between two nodes: the time, and the processor time of both nodes and the reader per GiB.

    python benchmarks/between_nodes.py [--json] [--repeats 15]

Node `far` stores objects. A reader of node `near`, which counts as another host, resolves them: its node fetches them
and verifies them. Processor time is what the operating system counted for the three processes, so it can be compared on
a machine that does other work. Beside it stands a plain Flight stream of the same bytes, which verifies nothing and
ends in private memory: what Flight itself costs on this machine.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:  # run by its path: this folder must not hide the package `dataplane`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import pyarrow.flight as fl
from rich.console import Console
from rich.table import Table

from benchmarks.paths.measuring import Case, helper
from benchmarks.paths.ours import Nodes, nodes
from benchmarks.paths.plain_flight import serve
from dataplane.client.client import Client
from dataplane.client.connect import connect
from dataplane.client.reader import Reader
from dataplane.core.process import keep_freed_memory

CASES = (
    Case(label="64 MiB", shapes=((64 << 20,),)),
    Case(label="1 MiB", shapes=((1 << 20,),) * 64),
    Case(label="0.1 to 1 MiB", shapes=tuple(((100 << 10) + 1847 * at,) for at in range(512))),
    Case(label="64 KiB", shapes=((64 << 10,),) * 256),
)
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one path and one case. Times are the median of the calls, and in brackets the shortest and the
    longest."""

    path: str
    objects: str
    count: int
    bytes: int
    seconds: list[float]
    """[3] The time of a call: median, shortest, longest."""
    processor_s_per_gib: list[float]
    """[3] The processor time of all processes that take part, per GiB: median, smallest, largest."""


def main() -> None:
    """Measure, and print a table. With --json, print one more line for programs."""
    description, _, usage = (__doc__ or "").partition("\n\n")
    arguments = argparse.ArgumentParser(
        prog="python benchmarks/between_nodes.py",
        description=description,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--json", action="store_true", help="print one more line, for programs")
    arguments.add_argument("--repeats", type=int, default=15, help="calls of each row (default 15)")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: everything is stopped
    console = Console(stderr=options.json)
    keep_freed_memory()
    rows: list[Row] = []
    try:
        with nodes(3 * GIB // 2) as running:
            for case in CASES:
                rows.append(fetched(running, case, options.repeats))
                rows.append(streamed(case, options.repeats))
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started is stopped")
    show(rows, console)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


def fetched(running: Nodes, case: Case, repeats: int) -> Row:
    """Measure views of objects that the far node has and the reader's node has not."""
    numbers = itertools.count()
    pids = (running.pid, running.far_pid, os.getpid())
    with Client(running.far_uri) as far, Client(running.uri) as near, Reader(running.uri) as reader:

        def calls() -> Iterator[Callable[[], object]]:
            while True:
                refs = running.producer.ask("put", running.far_uri, case, f"wire/{case.label}/{next(numbers)}")
                yield lambda refs=refs: reader.resolve(refs)
                near.release(refs)
                far.release(refs)

        return _measure("node to node", case, calls(), pids, repeats)


def streamed(case: Case, repeats: int) -> Row:
    """Measure a plain Flight stream of as many bytes."""
    with helper(serve) as server:
        port = server.ask("load", case)
        flight = connect(f"grpc://127.0.0.1:{port}")
        pids = (server.pid, os.getpid())
        calls = itertools.repeat(lambda: flight.do_get(fl.Ticket(b"")).read_all())
        try:
            return _measure("plain Flight stream", case, calls, pids, repeats)
        finally:
            flight.close()


def show(rows: list[Row], console: Console) -> None:
    """Print the table for people."""
    table = Table("path", "object", "objects", "call, ms", "processor, ms/GiB", title="between two nodes")
    for row in rows:
        table.add_row(row.path, row.objects, str(row.count), _three(row.seconds), _three(row.processor_s_per_gib))
    console.print(table)


def _measure(path: str, case: Case, calls: Iterator[Callable[[], object]], pids: tuple[int, ...], repeats: int) -> Row:
    """Time each call and the processor time of `pids` during it. The first call is not counted: it opens connections
    and faults pages in."""
    seconds: list[float] = []
    processor: list[float] = []
    for call in itertools.islice(calls, repeats + 1):
        used, started = _processor_s(pids), time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
        del result
        time.sleep(0.02)  # what the processes still finish belongs to the call
        processor.append((_processor_s(pids) - used) * GIB / case.total_bytes)
    return Row(
        path=path,
        objects=case.label,
        count=case.count,
        bytes=case.total_bytes,
        seconds=_spread(seconds[1:]),
        processor_s_per_gib=_spread(processor[1:]),
    )


def _processor_s(pids: tuple[int, ...]) -> float:
    """Return the processor time that processes have used, in seconds: Linux has a clock with nanoseconds for each
    process (`clock_getcpuclockid`)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _three(values: list[float]) -> str:
    median, low, high = (value * 1e3 for value in values)
    return f"{median:,.0f} [{low:,.0f}-{high:,.0f}]"


if __name__ == "__main__":
    main()
