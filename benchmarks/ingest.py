"""Measures a node's images per second beside plain processes, and the node's memory while a large data set is read
through it.

    python benchmarks/ingest.py [--json] [--gib 10] [--images 192]

Rate: both paths have the same JPEGs of 1 to 2 megapixels, the same decoder, kernel and number of processes (one per
core). The plain processes know the place of each picture; they decode, resize and cut it, and return nothing. The node
finds each picture in its shard, hashes, decodes, resizes, cuts it into shared memory, computes a checksum and returns a
ref. Rounds of the two paths alternate, each with new pictures, and the median round counts. On a busy machine, compare
`cpu_s_per_image`, the processor time of all processes of a path.

Memory: `--gib` of these pictures are read in windows. Every one is resolved and compared with its digest, and one of 32
is also made into patches. `peak_rss_bytes` is the largest measured sum of the node and its workers, the arena included;
memory that several processes share counts once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: this folder must not hide the package that its neighbour is named as
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common.memory import cpu_s, family, watched
from benchmarks.common.photos import photographs, variants, write_shards
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest, source_name
from dataplane.core.process import keep_freed_memory
from dataplane.core.refs import Ref
from dataplane.datasets.formats.range_files import read_local
from dataplane.media.images import decode_image
from dataplane.media.limits import DEFAULT_LIMITS
from dataplane.media.recipes import parse_recipe

RECIPE = {
    "kernel": "qwen_vl_patches",
    "version": 1,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 1280 * 28 * 28,
    "resample": "bicubic",
}
NUM_CORES = len(os.sched_getaffinity(0))
ROUNDS = 5
NUM_PICTURES = 64
WINDOW = 32
BUDGET_BYTES = 512 << 20
ALLOWED_BYTES = 224 << 20
ONE_IN = 32

Place = tuple[str, int, int]
"""The path of a shard, and the offset and size in bytes of a picture."""


def main() -> None:
    """Make the pictures, measure, and print. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    parser.add_argument("--gib", type=float, default=10.0, help="size of the set that is read; 0 leaves that out")
    parser.add_argument("--images", type=int, default=192, help="pictures of a round; 0 leaves the rates out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: everything is removed
    console = Console(stderr=options.json)
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="yatt-ingest-") as folder:
            check_disk(Path(folder), options.gib)
            with console.status("making pictures"):
                pictures = photographs(NUM_PICTURES)
            if options.images:
                rows += rates(Path(folder), pictures, options.images, console)
            if options.gib:
                rows.append(resident(Path(folder), pictures, round(options.gib * 2**30), console))
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started is stopped")
    show(rows, console)
    if options.json:
        print(json.dumps({"rows": rows}))


def check_disk(folder: Path, gib: float) -> None:
    """End with a message if the data set would not fit on the disk."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < gib + 2:
        sys.exit(
            f"{folder.parent} has {free_gib:.1f} GiB free; --gib {gib:g} wants {gib + 2:g}: set TMPDIR, or ask less"
        )


# -- images per second -------------------------------------------------------------------------------------------------


def rates(folder: Path, pictures: list[bytes], num_images: int, console: Console) -> list[dict[str, Any]]:
    """Measure how many pictures per second plain processes and a node make ready, in turns, with new pictures in each
    round. Return one row for each path."""
    sizes = itertools.islice(itertools.cycle(len(picture) for picture in pictures), num_images)
    round_bytes = sum(sizes)
    for number in range(ROUNDS + 1):
        write_shards(folder / f"round-{number}", variants(pictures, number), round_bytes)
    roots = {f"round-{number}": [f"{folder}/round-{number}/*.tar"] for number in range(ROUNDS + 1)}
    measured: dict[str, list[tuple[float, float]]] = {"plain_processes": [], "ours": []}
    context = multiprocessing.get_context("spawn")
    with (
        EmbeddedNode(memory_bytes=1 << 30, roots=roots, num_workers=NUM_CORES) as node,
        Client(node.uri) as client,
        context.Pool(NUM_CORES, begin_process) as processes,
    ):
        for number in track(range(ROUNDS + 1), description="rates", console=console, transient=True):
            name = f"round-{number}"
            num_samples = client.ingest(name).num_samples
            places = _places(folder / name)
            alone = [process.pid for process in multiprocessing.active_children()]
            plain = _timed(alone, lambda places=places: processes.map(make_alone, places, chunksize=1))
            nodes = [*family(node.pid), os.getpid()]
            ours = _timed(nodes, lambda name=name, count=num_samples: derive_all(client, name, count))
            if number:  # the first round starts processes and fills caches
                measured["plain_processes"].append(plain)
                measured["ours"].append(ours)
    rows = []
    for path, rounds in measured.items():
        seconds, cpu_seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
        row = {"path": path, "images": num_samples, "seconds": seconds, "images_per_s": num_samples / seconds}
        rows.append(row | {"cpu_s_per_image": cpu_seconds / num_samples})
    return rows


def begin_process() -> None:
    """Set a plain process up as the node sets up its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory(32 << 20, 256 << 20)


def make_alone(place: Place) -> int:
    """Decode, resize and cut one picture in a plain process. Return only its size."""
    image, _ = decode_image(read_local(*place), ("JPEG",), DEFAULT_LIMITS)
    plan = parse_recipe(RECIPE).plan(image)
    out = np.empty(int(np.prod(plan.shape)), np.uint8)
    plan.write(out)
    return out.nbytes


def derive_all(client: Client, dataset: str, count: int) -> int:
    """Have all patches made, window by window, and return how many were made. The next window is requested before the
    present one is ready."""

    def derive(start: int) -> int:
        samples = client.samples(dataset, range(start, min(start + WINDOW, count)))
        made = client.derive([ref for sample in samples for ref in sample.media], RECIPE)
        return sum(isinstance(item, Ref) for item in made)

    with ThreadPoolExecutor(2) as threads:
        num_made = sum(threads.map(derive, range(0, count, WINDOW)))
    if num_made != count:
        raise RuntimeError(f"the node made {num_made} of {count} pictures of {dataset}; see its quarantine")
    return num_made


def _places(folder: Path) -> list[Place]:
    """Return the places of the pictures, from the headers of the shards."""
    places = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            places += [(str(shard), member.offset_data, member.size) for member in tar.getmembers()]
    return places


def _timed(pids: Sequence[int], work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that the work takes, and the seconds of processor time that these processes spend
    meanwhile."""
    before, started = cpu_s(pids), time.perf_counter()
    work()
    return time.perf_counter() - started, cpu_s(pids) - before


# -- resident memory ---------------------------------------------------------------------------------------------------


def resident(folder: Path, pictures: list[bytes], total_bytes: int, console: Console) -> dict[str, Any]:
    """Read a data set many times larger than the arena through a node, and measure the node's memory. Return the
    row."""
    with console.status(f"writing {total_bytes / 2**30:.1f} GiB of pictures"):
        count = write_shards(folder / "set", variants(pictures, -1), total_bytes)
    roots = {"set": [f"{folder}/set/*.tar"]}
    started = time.perf_counter()
    with EmbeddedNode(memory_bytes=BUDGET_BYTES, roots=roots, num_workers=NUM_CORES) as node:
        with Client(node.uri) as client, Reader(node.uri) as reader, watched(node.pid) as peak:
            client.ingest("set")
            windows = range(0, count, WINDOW)
            for start in track(windows, description="reading", console=console, transient=True):
                samples = client.samples("set", range(start, min(start + WINDOW, count)))
                sources = [ref for sample in samples for ref in sample.media]
                check_sources(reader, sources)
                check_patches(reader, client.derive(sources[::ONE_IN], RECIPE))
            num_media = client.stat()["num_media"]
    shutil.rmtree(folder / "set")
    return {
        "path": "resident",
        "bytes": total_bytes,
        "images": count,
        "patched": num_media,
        "seconds": time.perf_counter() - started,
        "budget_bytes": BUDGET_BYTES,
        "allowed_bytes": BUDGET_BYTES + ALLOWED_BYTES,
        "peak_rss_bytes": peak["all"],
        "peak_node_rss_bytes": peak["node"],
    }


def check_sources(reader: Reader, refs: Sequence[Ref]) -> None:
    """Resolve encoded pictures. Raises RuntimeError if the bytes of one do not match its name."""
    for ref, view in zip(refs, reader.resolve(refs), strict=True):
        if source_name(content_digest(view)) != ref.name:
            raise RuntimeError(f"{ref.name} resolved to other bytes")


def check_patches(reader: Reader, made: Sequence[Any]) -> None:
    """Resolve patches. Raises RuntimeError for bad media and for wrong bytes."""
    bad = [item for item in made if not isinstance(item, Ref)]
    if bad:
        raise RuntimeError(f"{len(bad)} pictures could not be made, the first because: {bad[0].reason}")
    for ref, view in zip(made, reader.resolve(made), strict=True):
        if content_digest(view) != ref.meta["checksum"]:
            raise RuntimeError(f"{ref.name} resolved to other bytes")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows, and the ratios that follow from them, for people."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table("what", "figure", title=f"{NUM_CORES} cores, load average {load}")
    speed = {row["path"]: row["images_per_s"] for row in rows if "images_per_s" in row}
    for path, value in speed.items():
        table.add_row(path, f"{value:.1f} images/s")
    if speed:
        table.add_row("ours / plain_processes", f"{speed['ours'] / speed['plain_processes']:.3f}")
        for row in rows[:2]:
            table.add_row(f"processor time, {row['path']}", f"{row['cpu_s_per_image'] * 1e3:.1f} ms/image")
    for row in rows:
        if row["path"] == "resident":
            table.add_row("read", f"{row['bytes'] / 2**30:.1f} GiB, {row['images']} images in {row['seconds']:.0f} s")
            for name in ("budget_bytes", "peak_rss_bytes", "peak_node_rss_bytes", "allowed_bytes"):
                table.add_row(name, f"{row[name] / 2**20:,.0f} MiB")
    console.print(table)


if __name__ == "__main__":
    main()
