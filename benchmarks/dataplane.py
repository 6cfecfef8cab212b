"""How long until a consumer can compute on an object, and how long until others can have it: one table of all paths.

    python benchmarks/dataplane.py [--json] [--quick]

The same random payloads go through every path in one run: 64 KiB, 1 MiB, 64 MiB, and a batch as a training step has it
(512 objects of patches, 0.07 to 1.4 MiB; its `bytes` is the mean). `seconds` is the median of the call that handles
all `count` objects; rows with count 1 are single calls. What is read was put by another process. What a consumer ends
with differs, and is the point of the comparison:

    memcpy, blake3       the limits: copying to warm memory, hashing, with one thread
    ours/resolve         read-only views of the node's shared memory; no bytes move
    ours/put             verified: hashed, copied into the node's arena, published
    ours/write_seal      copied into the node's arena by a worker that maps it, published without a hash
    ours/cross_node      as ours/resolve, of another node's objects: fetched over Flight and verified first
    flight/do_get        Arrow columns, copied over loopback by the best plain Flight stream (a bare server)
    ray/get_torch        private tensors, copied by Ray         ray/get_ndarray   read-only views of Ray's shared memory
    ray/put              arrays into Ray's shared memory
    transferqueue/get    a private copy as one tensor           transferqueue/put   a batch into its storage units
    pickle/pipe          private arrays, pickled over a pipe

All processes of ours and the measuring one keep freed memory (malloc does not give it back), which helps every path.
It starts its own nodes and its own Ray and stops exactly those. `--quick` runs tiny cases without Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run by its path: this folder must not hide the package that has this file's name
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.paths.measuring import Measured

RATIOS = (
    ("resolve against ray.get of a tensor", "ray/get_torch", "ours/resolve"),
    ("resolve against TransferQueue's get", "transferqueue/get", "ours/resolve"),
    ("put against BLAKE3", "blake3", "ours/put"),
    ("write and seal against memcpy", "memcpy", "ours/write_seal"),
    ("another node's object against a plain Flight stream", "flight/do_get", "ours/cross_node"),
)
"""The ratios to print: a name, and the two paths whose times are divided."""


def main() -> None:
    """Measure and print the table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    parser.add_argument("--quick", action="store_true", help="tiny cases, few repeats, no Ray and no TransferQueue")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: everything is stopped
    from benchmarks.paths.suite import run

    console = Console(stderr=options.json)
    measured: list[Measured] = []
    try:
        with console.status("starting") as status:
            for row in run(quick=options.quick, console=console):
                measured.append(row)
                status.update(f"measured {row.case.label}: {row.path}")
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started is stopped")
    show(measured, console)
    if options.json:
        print(json.dumps({"rows": [row.to_row() for row in measured]}))


def show(measured: list[Measured], console: Console) -> None:
    """Print the table and the ratios for people."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(
        *("path", "object", "objects", "call", "per object", "GB/s"), title=f"load average {load}; medians of a call"
    )
    table.columns[0].no_wrap = True
    last = ""
    for row in measured:
        if last and row.case.label != last:
            table.add_section()
        last = row.case.label
        count, rate = row.case.count, row.case.total_bytes / row.seconds / 1e9
        table.add_row(row.path, last, str(count), _time(row.seconds), _time(row.seconds / count), f"{rate:,.2f}")
    console.print(table)
    seconds = {(row.path, row.case.label, row.case.count): row.seconds for row in measured}
    ratios = Table("times as fast", "object", "objects", "ratio")
    for what, slow, fast in RATIOS:
        for (path, label, count), value in seconds.items():
            if path == fast and (slow, label, count) in seconds:
                ratios.add_row(what, label, str(count), f"{seconds[slow, label, count] / value:,.2f}")
    console.print(ratios)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


if __name__ == "__main__":
    main()
