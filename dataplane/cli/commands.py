"""The commands of `python -m dataplane` that call a node: put, get, release, stat, top, ingest, quarantine.

Each function takes a client and the parsed arguments, makes the calls, and prints the result.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from dataplane.cli import top as frames
from dataplane.cli.progress import bar, read_file
from dataplane.client.client import Client
from dataplane.core.errors import BadRequestError, MissingObjectError
from dataplane.core.refs import BadMedia, Dataset, Ref
from dataplane.core.units import format_bytes

PROGRESS_EVERY_S = 0.5
"""The seconds between two updates of the progress of `ingest`."""
CHECK_AT_ONCE = 256
"""The number of samples per request of `ingest --check`."""


def put(client: Client, args: argparse.Namespace) -> None:
    """Store a file and print its name."""
    data = read_file(args.file)
    meta = {"file": args.file.name}
    with bar(f"storing {args.file.name}"):
        if args.name:
            ref = client.put(data, name=args.name, meta=meta, scope=args.scope, durable=args.durable)
        else:
            ref = client.put_source(data, meta, scope=args.scope, durable=args.durable)
    print(json.dumps(ref.to_dict()) if args.json else ref.name)


def get(client: Client, args: argparse.Namespace) -> None:
    """Write an object to a file, or to standard output."""
    target: Ref | str = args.name
    if args.name.startswith("{"):
        try:
            target = Ref.from_dict(json.loads(args.name))
        except ValueError as error:
            raise BadRequestError(f"the argument is not a ref: {error}") from error
    try:
        with bar("fetching") as on_bytes:
            data = client.get(target, on_bytes=on_bytes)
    except MissingObjectError as error:
        if isinstance(target, Ref):
            raise
        raise MissingObjectError(
            f"no object is named {target!r}; put prints the name of each object that it stores"
        ) from error
    if args.output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    args.output.write_bytes(data)
    print(f"{format_bytes(len(data))} to {args.output}", file=sys.stderr)


def release(client: Client, args: argparse.Namespace) -> None:
    """Drop a plain object, or mark a source or derived one as the first to evict."""
    if not client.release_names([args.name]):
        raise MissingObjectError(f"no object is named {args.name!r}")


def stat(client: Client, args: argparse.Namespace) -> None:
    """Print the counters of the node, its calls by verb and its data sets."""
    found = client.stat()
    if args.json:
        print(json.dumps(found))
        return
    table = Table("", "value", title=f"node {found['node']} at {client.uri}")
    for key, value in found.items():
        if isinstance(value, str) and key != "node":
            table.add_row(key, value)
        elif isinstance(value, (int, float)):
            is_size = key.endswith("_bytes")
            table.add_row(key, f"{value:,} ({format_bytes(value)})" if is_size else f"{value:,}")
    console = Console()
    console.print(table)
    if found["standing_still"]:
        console.print(frames.still_table(found["standing_still"]))
    if found["verbs"]:
        console.print(frames.verbs_table(found["verbs"], {}, found["uptime_s"]))
    if found["datasets"]:
        console.print(frames.datasets_table(found["datasets"]))


def top(client: Client, args: argparse.Namespace) -> None:
    """Draw a live picture of the node until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        frames.top(client, Console(), interval_s=args.interval, is_once=args.once)


def ingest(client: Client, args: argparse.Namespace) -> None:
    """Index a data set, read the media of its first `--check` samples, and print what is bad."""
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(1) as thread:
        task = progress.add_task(f"indexing the shards of {args.dataset}", total=None)
        ingesting = thread.submit(client.ingest, args.dataset)
        while not wait([ingesting], timeout=PROGRESS_EVERY_S).done:
            counts = client.stat()["datasets"].get(args.dataset)
            if counts:
                progress.update(task, completed=counts["num_shards_read"], total=counts["num_shards_found"] or None)
        dataset = ingesting.result()
        bad = [*dataset.bad, *_check(client, dataset, args.check, progress)]
    if args.json:
        print(json.dumps(dataset.to_dict() | {"bad": [item.to_dict() for item in bad]}))
        return
    console = Console()
    plural = "shard" if dataset.num_shards == 1 else "shards"
    print(f"{dataset.name}: {dataset.num_samples:,} samples in {dataset.num_shards:,} {plural}")
    if bad:
        console.print(_bad_table(bad, f"{len(bad)} found bad"))
    checked = min(args.check, dataset.num_samples)
    print(
        f"The media of {checked:,} samples were read. "
        if checked
        else "Rows and media are checked when they are read "
        f"(--check {min(dataset.num_samples, 1000)} reads some now). ",
        "No medium was decoded; `python -m dataplane quarantine` lists those that cannot be.",
        sep="",
    )


def quarantine(client: Client, args: argparse.Namespace) -> None:
    """Print the media that the node could not decode."""
    bad = client.quarantine()
    if args.json:
        print(json.dumps({"bad": [item.to_dict() for item in bad]}))
    elif bad:
        Console().print(_bad_table(bad, f"{len(bad)} in quarantine"))
    else:
        print("no medium is in quarantine: the node could decode all media that it has tried")


def _check(client: Client, dataset: Dataset, num_checked: int, progress: Progress) -> list[BadMedia]:
    """Return what is bad in the rows and media of the first samples. They are read and hashed, but not decoded."""
    total = min(num_checked, dataset.num_samples)
    if not total:
        return []
    bad: list[BadMedia] = []
    task = progress.add_task("reading media", total=total)
    for start in range(0, total, CHECK_AT_ONCE):
        for sample in client.samples(dataset.name, range(start, min(start + CHECK_AT_ONCE, total))):
            bad += sample.bad
        progress.update(task, completed=start + CHECK_AT_ONCE)
    return bad


def _bad_table(bad: Sequence[BadMedia], title: str) -> Table:
    """Return a table of bad media with their place and reason."""
    table = Table("dataset", "shard", "offset", "key", "reason", title=title)
    for item in bad:
        offset = str(item.offset) if item.offset >= 0 else ""
        table.add_row(item.dataset, *map(escape, (item.shard, offset, item.key, item.reason)))
    return table
