"""How long it takes until another process can compute on an object: data plane, Ray, plain Flight, and memcpy.

    python benchmarks/resolve.py [--json]

It starts its own node and its own Ray, and stops both. A view moves no bytes: its GB/s are nominal, and the rows
`... and read` also read one byte of every page. Objects are put by another process than the one that measures.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import pyarrow.flight as fl
import ray
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dataplane.client import Client
from dataplane.embedded import EmbeddedNode
from dataplane.process import keep_freed_memory
from dataplane.reader import Reader
from dataplane.refs import Ref
from dataplane.torch_view import as_tensor

SIZES = ((64 << 10, 256), (1 << 20, 64), (64 << 20, 2))
REPEATS = 7
PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: the median over REPEATS of the time for all `count` objects."""

    path: str
    bytes: int
    count: int
    seconds: float
    gb_per_s: float


@ray.remote(num_cpus=1)
class Putter:
    """Another process, for Ray's rows."""

    def put(self, nbytes: int, count: int, kind: str) -> list[Any]:
        """References of new objects."""
        arrays = [np.full(nbytes, at % 251, np.uint8) for at in range(count)]
        return [ray.put(torch.from_numpy(array) if kind == "tensor" else array) for array in arrays]


def measure(path: str, nbytes: int, count: int, work: Callable[[], object]) -> Row:
    """Run `work`, which handles all objects, until the median is worth something."""
    seconds = []
    for turn in range(REPEATS + 1):
        started = time.perf_counter()
        result = work()
        if turn:  # the first run opens connections and faults pages in
            seconds.append(time.perf_counter() - started)
        del result
    median = statistics.median(seconds)
    return Row(path=path, bytes=nbytes, count=count, seconds=median, gb_per_s=nbytes * count / median / 1e9)


def read_pages(arrays: list[np.ndarray]) -> int:
    """Touch every page, as a consumer would."""
    return sum(int(array[::PAGE].sum()) for array in arrays)


def dataplane_rows(uri: str, nbytes: int, count: int) -> Iterator[Row]:
    """Resolving through the data plane, and the same objects over a plain Flight client."""
    with Client(uri) as client, Reader(uri) as reader:
        refs: list[Ref] = []
        for at in range(count):
            refs.append(client.put(np.full(nbytes, at % 251, np.uint8), name=f"bench/{nbytes}/{at}"))
        yield measure("dataplane resolve", nbytes, count, lambda: reader.resolve(refs))
        yield measure(
            "dataplane resolve, as tensors", nbytes, count, lambda: [as_tensor(view) for view in reader.resolve(refs)]
        )
        yield measure("dataplane resolve and read", nbytes, count, lambda: read_pages(reader.resolve(refs)))
        yield measure("dataplane resolve one by one", nbytes, count, lambda: [reader.resolve([ref]) for ref in refs])
        flight = fl.FlightClient(uri)
        tickets = [fl.Ticket(json.dumps({"name": ref.name}).encode()) for ref in refs]
        yield measure(
            "Flight DoGet", nbytes, count, lambda: [flight.do_get(ticket).read_all().num_rows for ticket in tickets]
        )
        flight.close()
        client.release(refs)


def ray_rows(putter: Any, nbytes: int, count: int) -> Iterator[Row]:
    """`ray.get` of objects that an actor put."""
    for kind in ("ndarray", "tensor"):
        refs = ray.get(putter.put.remote(nbytes, count, kind))
        yield measure(f"ray.get {kind}", nbytes, count, lambda refs=refs: ray.get(refs))
        if kind == "ndarray":
            yield measure(f"ray.get {kind} and read", nbytes, count, lambda refs=refs: read_pages(ray.get(refs)))
        yield measure(
            f"ray.get {kind} one by one", nbytes, count, lambda refs=refs: [ray.get(ref) is not None for ref in refs]
        )
        del refs


def memcpy_row(nbytes: int, count: int) -> Row:
    """The limit for everything that moves bytes."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def copy() -> None:
        for _ in range(count):
            np.copyto(target, source)

    return measure("memcpy, warm", nbytes, count, copy)


@contextmanager
def local_ray() -> Iterator[Any]:
    """A Ray of our own with one actor; its files end with it."""
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            address="local",
            _temp_dir=folder,
        )
        try:
            yield Putter.remote()
        finally:
            ray.shutdown()


def run() -> list[Row]:
    """Every row, side by side: all paths of one size before the next size."""
    rows: list[Row] = []
    keep_freed_memory()
    torch.set_num_threads(1)
    with EmbeddedNode(memory_bytes=256 << 20, roots={}) as node, local_ray() as putter:
        for nbytes, count in track(SIZES, description="measuring", console=Console(stderr=True), transient=True):
            rows.append(memcpy_row(nbytes, count))
            rows += dataplane_rows(node.uri, nbytes, count)
            rows += ray_rows(putter, nbytes, count)
    return rows


def show(rows: list[Row]) -> None:
    """The table for people."""
    table = Table("path", "object", "objects", "total", "per object", "GB/s", title="until another process can compute")
    table.columns[0].no_wrap = True
    last = 0
    for row in rows:
        if last and row.bytes != last:
            table.add_section()
        last = row.bytes
        size = f"{row.bytes >> 20} MiB" if row.bytes >= 1 << 20 else f"{row.bytes >> 10} KiB"
        each = row.seconds / row.count
        per_object = f"{each * 1e3:.2f} ms" if each >= 1e-3 else f"{each * 1e6:.1f} µs"
        table.add_row(row.path, size, str(row.count), f"{row.seconds * 1e3:.2f} ms", per_object, f"{row.gb_per_s:,.1f}")
    Console().print(table)


def main() -> None:
    """Measure, print, and with --json end with one line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    args = parser.parse_args()
    rows = run()
    show(rows)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
