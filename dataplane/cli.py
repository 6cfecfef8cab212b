"""The command line: one parser, one small function a command. `serve` lives in `serve.py`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dataplane.call_limits import CallLimits
from dataplane.client import Client
from dataplane.connect import Credentials
from dataplane.errors import BadRequestError, DataPlaneError, MissingObjectError
from dataplane.limits import DEFAULT_LIMITS
from dataplane.numa import NumaPolicy
from dataplane.progress import bar, read_file
from dataplane.refs import Ref
from dataplane.sizes import format_bytes, parse_bytes
from dataplane.top import datasets_table, top, verbs_table
from dataplane.wire import DEFAULT_PORT

PROGRESS_EVERY_S = 0.5
DEFAULT_URI = f"grpc://127.0.0.1:{DEFAULT_PORT}"

_EXAMPLES = """examples:
  python -m dataplane serve --memory 1GiB --root train='shards/train-*.tar'
  python -m dataplane put cat.jpg
  python -m dataplane put weights.bin --name weights/step-10
  python -m dataplane get weights/step-10 --output copy.bin
  python -m dataplane ingest train
  python -m dataplane stat --json
  python -m dataplane top
  python -m dataplane serve --host 0.0.0.0 --token-file tokens --tls-cert node.pem --tls-key node.key
  python -m dataplane stat --uri grpc+tls://node:8815 --token-file token --tls-ca ca.pem
"""


def parse_memory(text: str) -> int:
    """Bytes of `1GiB`, `512MiB`, `1.5GB`, `1048576`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_numa(text: str) -> NumaPolicy:
    """`interleave` or `bind:N`."""
    try:
        return NumaPolicy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_root(text: str) -> tuple[str, str]:
    """Name and glob of `NAME=GLOB`."""
    name, equals, pattern = text.partition("=")
    if not (name and equals and pattern):
        raise argparse.ArgumentTypeError(f"{text!r} names no dataset; wanted NAME=GLOB, such as train='train-*.tar'")
    return name, pattern


def parse_peer(text: str) -> tuple[str, str]:
    """Id and address of `ID=URI`."""
    node_id, equals, uri = text.partition("=")
    if not (node_id and equals and uri.startswith("grpc")):
        raise argparse.ArgumentTypeError(f"{text!r} names no node; wanted ID=URI, such as a=grpc://10.0.0.1:8815")
    return node_id, uri


def parse_seconds(text: str) -> float:
    """A time to wait: more than 0, at most a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait; wanted seconds, more than 0 and at most 86400")
    return seconds


def parse_port(text: str) -> int:
    """A TCP port; 0 means any."""
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; wanted 0 to 65535")
    return int(text)


def parse_workers(text: str) -> int:
    """A number of processes."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers; wanted 1 to 1024")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    formatter = argparse.RawDescriptionHelpFormatter
    description = "Run a data-plane node, or store, fetch and look at what one holds."
    parser = argparse.ArgumentParser(
        "python -m dataplane", description=description, epilog=_EXAMPLES, formatter_class=formatter
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="serve | put | get | release | stat | top | ingest"
    )

    serve = commands.add_parser("serve", help="run a node until Ctrl-C", epilog=_EXAMPLES, formatter_class=formatter)
    serve.add_argument(
        "--port", type=parse_port, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0 takes a free one"
    )
    serve.add_argument("--memory", type=parse_memory, default="1GiB", help="byte budget in /dev/shm, default 1GiB")
    serve.add_argument(
        "--spill", type=Path, metavar="DIR", help="a folder for what has no room in memory, and for durable objects"
    )
    serve.add_argument(
        "--spill-size", type=parse_memory, default="10GiB", help="what the files there may take, default 10GiB"
    )
    serve.add_argument(
        "--numa", type=parse_numa, metavar="POLICY", help="interleave or bind:N: where the pages of the memory lie"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="default 127.0.0.1; beyond loopback it needs --token-file or --tls-cert"
    )
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="lines of TOKEN [read|write|admin] [EXPIRY]")
    serve.add_argument("--tls-cert", type=Path, metavar="PEM", help="the node's certificate: it then speaks TLS only")
    serve.add_argument("--tls-key", type=Path, metavar="PEM", help="the private key of --tls-cert")
    serve.add_argument(
        "--tls-ca", type=Path, metavar="PEM", help="clients must show a certificate that this one signed"
    )
    serve.add_argument(
        "--metrics-port", type=parse_port, metavar="P", help="serve counts over HTTP for Prometheus; 0 takes a free one"
    )
    limits = CallLimits()
    serve.add_argument("--max-calls", type=int, default=limits.max_calls, help=f"at once, default {limits.max_calls}")
    serve.add_argument(
        "--max-streams", type=int, default=limits.max_streams, help=f"open at once, default {limits.max_streams}"
    )
    serve.add_argument(
        "--max-leases", type=int, default=limits.max_leases, help=f"of all readers, default {limits.max_leases}"
    )
    serve.add_argument(
        "--max-message",
        type=parse_memory,
        default=limits.max_message_bytes,
        help=f"largest batch of a DoPut, default {format_bytes(limits.max_message_bytes)}",
    )
    serve.add_argument("--insecure", action="store_true", help="listen beyond loopback with neither tokens nor TLS")
    serve.add_argument(
        "--root",
        type=parse_root,
        action="append",
        default=[],
        metavar="NAME=GLOB",
        help="a dataset that clients may read: its name, and its tars, Parquet, JSON lines or folder; repeatable",
    )
    serve.add_argument(
        "--media-root",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder into which the paths of JSON lines and tables may lead, besides those of --root; repeatable",
    )
    serve.add_argument("--workers", type=parse_workers, default=1, help="processes that decode images, default 1")
    serve.add_argument("--node-id", metavar="ID", help="what refs name; keep it over restarts; default: a random one")
    serve.add_argument("--host-id", metavar="ID", help="who shares memory with this node; default: this machine's")
    for name, value in DEFAULT_LIMITS.to_dict().items():
        flag = "--" + name.replace("_", "-")
        parse = type(value) if name != "max_media_bytes" else parse_memory
        serve.add_argument(flag, type=parse, default=value, help=f"refuse media above this, default {value}")
    serve.add_argument(
        "--peer",
        type=parse_peer,
        action="append",
        default=[],
        metavar="ID=URI",
        help="another node and its address, from which objects are fetched; repeatable",
    )
    serve.add_argument(
        "--directory", type=Path, metavar="DIR", help="a folder (mode 0700) in which nodes write and find addresses"
    )
    serve.add_argument("--advertise", default="", metavar="URI", help="the address that other nodes use for this one")
    serve.add_argument("--peer-token-file", type=Path, metavar="FILE", help="the token that this node shows others")
    serve.add_argument(
        "--peer-streams", type=int, default=4, metavar="N", help="connections for a big object, default 4"
    )
    serve.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)

    put = _add_client_command(commands, "put", "store a file and print its name")
    put.add_argument("file", type=Path)
    put.add_argument("--name", help="store a plain object under this name; without it the digest of its bytes names it")
    put.add_argument("--json", action="store_true", help="print the whole ref")

    get = _add_client_command(commands, "get", "write an object to a file or to standard output")
    get.add_argument("name", help="the name that put printed, or a ref as JSON")
    get.add_argument("--output", "-o", type=Path, help="default: standard output")

    release = _add_client_command(commands, "release", "drop a plain object, or let another be evicted first")
    release.add_argument("name")

    stat = _add_client_command(commands, "stat", "counts and bytes of a node")
    stat.add_argument("--json", action="store_true", help="one JSON object")

    watch = _add_client_command(commands, "top", "watch a node: rates, memory, latencies")
    watch.add_argument("--once", action="store_true", help="print one frame, with rates since the node's start")
    watch.add_argument("--interval", type=parse_seconds, default=1.0, help="seconds between frames, default 1")

    ingest = _add_client_command(commands, "ingest", "index the shards of a dataset and show what is wrong with them")
    ingest.add_argument("dataset")
    ingest.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 1 after one line that says what is wrong."""
    args = build_parser().parse_args(argv)
    if args.command == "serve":
        from dataplane.serve import serve

        return serve(args)
    commands = {"put": _put, "get": _get, "release": _release, "stat": _stat, "top": _top, "ingest": _ingest}
    try:
        with Client(args.uri, timeout_s=args.timeout, credentials=_credentials(args)) as client:
            commands[args.command](client, args)
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails to flush at its end
        return 1
    except KeyboardInterrupt:
        return 130
    except (DataPlaneError, OSError) as error:
        print(f"dataplane {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _add_client_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=text, description=text, epilog=_EXAMPLES, formatter_class=formatter)
    uri = os.environ.get("DATAPLANE_URI", DEFAULT_URI)
    parser.add_argument("--uri", default=uri, help=f"address of the node, default $DATAPLANE_URI or {DEFAULT_URI}")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="its first token is shown; default $DATAPLANE_TOKEN_FILE"
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="PEM", help="who signed the node's certificate; default $DATAPLANE_TLS_CA"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="this client's own; default $DATAPLANE_TLS_CERT")
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="the key of --tls-cert; default $DATAPLANE_TLS_KEY")
    parser.add_argument("--timeout", type=parse_seconds, default=300.0, help="seconds to wait, default 300")
    return parser


def _credentials(args: argparse.Namespace) -> Credentials:
    """The environment's, with what the command line says instead."""
    given = Credentials.from_environment()
    return replace(
        given,
        token_file=args.token_file or given.token_file,
        tls_ca=args.tls_ca or given.tls_ca,
        tls_cert=args.tls_cert or given.tls_cert,
        tls_key=args.tls_key or given.tls_key,
    )


def _put(client: Client, args: argparse.Namespace) -> None:
    data = read_file(args.file)
    meta = {"file": args.file.name}
    with bar(f"storing {args.file.name}"):
        ref = client.put(data, name=args.name, meta=meta) if args.name else client.put_source(data, meta)
    print(json.dumps(ref.to_dict()) if args.json else ref.name)


def _get(client: Client, args: argparse.Namespace) -> None:
    target: Ref | str = args.name
    if args.name.startswith("{"):
        try:
            target = Ref.from_dict(json.loads(args.name))
        except ValueError as error:
            raise BadRequestError(f"that is no ref: {error}") from error
    try:
        with bar("fetching") as on_bytes:
            data = client.get(target, on_bytes=on_bytes)
    except MissingObjectError as error:
        if isinstance(target, Ref):
            raise
        raise MissingObjectError(f"no object is named {target!r}; put prints the names of what it stores") from error
    if args.output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    args.output.write_bytes(data)
    print(f"{format_bytes(len(data))} to {args.output}", file=sys.stderr)


def _release(client: Client, args: argparse.Namespace) -> None:
    if not client.release_names([args.name]):
        raise MissingObjectError(f"no object is named {args.name!r}")


def _stat(client: Client, args: argparse.Namespace) -> None:
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
    if found["verbs"]:
        console.print(verbs_table(found["verbs"], {}, found["uptime_s"]))
    if found["datasets"]:
        console.print(datasets_table(found["datasets"]))


def _top(client: Client, args: argparse.Namespace) -> None:
    with suppress(KeyboardInterrupt):
        top(client, Console(), interval_s=args.interval, is_once=args.once)


def _ingest(client: Client, args: argparse.Namespace) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(1) as thread:
        task = progress.add_task(f"indexing the shards of {args.dataset}", total=None)
        ingesting = thread.submit(client.ingest, args.dataset)
        while not wait([ingesting], timeout=PROGRESS_EVERY_S).done:
            counts = client.stat()["datasets"].get(args.dataset)
            if counts:
                progress.update(task, completed=counts["num_shards_read"], total=counts["num_shards_found"] or None)
        dataset = ingesting.result()
    if args.json:
        print(json.dumps(dataset.to_dict()))
        return
    console = Console()
    plural = "shard" if dataset.num_shards == 1 else "shards"
    console.print(f"{dataset.name}: {dataset.num_samples:,} samples in {dataset.num_shards:,} {plural}")
    if dataset.bad:
        table = Table("shard", "offset", "key", "reason", title=f"{len(dataset.bad)} in quarantine")
        for bad in dataset.bad:
            table.add_row(bad.shard, str(bad.offset), bad.key, bad.reason)
        console.print(table)
