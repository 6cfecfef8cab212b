"""The entry point of `python -m dataplane`: the parser of all commands, and the handling of their errors.

The commands that call a node are in `commands.py`, and `serve` is in `serve.py`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dataplane.cli.parsers import parse_count, parse_seconds
from dataplane.cli.serve_options import add_serve
from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.core.errors import DataPlaneError
from dataplane.core.hosts import DEFAULT_PORT
from dataplane.core.os_errors import describe_error

DEFAULT_URI = f"grpc://127.0.0.1:{DEFAULT_PORT}"
"""The address of the node if neither --uri nor $DATAPLANE_URI is given."""

_EXAMPLES = """examples:
  python -m dataplane serve --memory 1GiB --root train='shards/train-*.tar'
  python -m dataplane put cat.jpg
  python -m dataplane put weights.bin --name weights/step-10
  python -m dataplane get weights/step-10 --output copy.bin
  python -m dataplane release weights/step-10
  python -m dataplane ingest train
  python -m dataplane quarantine
  python -m dataplane stat --json
  python -m dataplane top
  python -m dataplane serve --memory 1GiB --spill disk --spill-size 100GiB
  python -m dataplane put weights.bin --name weights/step-20 --durable
  python -m dataplane serve --host 0.0.0.0 --token-file tokens --tls-cert node.pem --tls-key node.key
  python -m dataplane stat --uri grpc+tls://node:8815 --token-file token --tls-ca ca.pem
"""
"""The end of every --help text."""

_COMMANDS = ("put", "get", "release", "stat", "top", "ingest", "quarantine")
"""The commands that call a node. Each is a function of `commands.py`."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    formatter = argparse.RawDescriptionHelpFormatter
    description = "Run a data-plane node, or store, read and list the objects that a node holds."
    program = "dataplane" if Path(sys.argv[0]).name == "dataplane" else "python -m dataplane"
    parser = argparse.ArgumentParser(program, description=description, epilog=_EXAMPLES, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(["serve", *_COMMANDS]))
    add_serve(commands.add_parser("serve", help="run a node until Ctrl-C", epilog=_EXAMPLES, formatter_class=formatter))

    put = _add_client_command(commands, "put", "store a file and print its name")
    put.add_argument("file", type=Path)
    put.add_argument(
        "--name", help="store a plain object under this name; default: a source named by the digest of its bytes"
    )
    put.add_argument(
        "--scope",
        metavar="NAME",
        help="put the object into this open scope; it ends with the scope",
    )
    put.add_argument(
        "--durable",
        action="store_true",
        help="write the object to the node's disk (serve --spill) before this command ends",
    )
    put.add_argument("--json", action="store_true", help="print the whole ref")

    get = _add_client_command(commands, "get", "write an object to a file or to standard output")
    get.add_argument("name", help="the name that put printed, or a ref as JSON")
    get.add_argument("--output", "-o", type=Path, metavar="FILE", help="default: standard output")

    release = _add_client_command(
        commands, "release", "drop a plain object, or mark a source or derived one as the first to evict"
    )
    release.add_argument("name")

    stat = _add_client_command(commands, "stat", "print the counters of a node")
    stat.add_argument("--json", action="store_true", help="print one JSON object")

    watch = _add_client_command(commands, "top", "show rates, memory and latencies of a node, and update them")
    watch.add_argument("--once", action="store_true", help="print one frame, with the rates since the node's start")
    watch.add_argument("--interval", type=parse_seconds, default=1.0, help="seconds between two frames, default 1")

    ingest = _add_client_command(commands, "ingest", "index the shards of a dataset and list what is bad in them")
    ingest.add_argument("dataset")
    ingest.add_argument(
        "--check", type=parse_count, default=0, metavar="N", help="also read the media of the first N samples"
    )
    ingest.add_argument("--json", action="store_true", help="print one JSON object")

    quarantine = _add_client_command(commands, "quarantine", "list the media that the node could not decode")
    quarantine.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 after a one-line error message, or 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    if args.command == "serve":
        from dataplane.cli.serve import serve

        return serve(args)
    from dataplane.cli import commands  # they print tables, whose library a node does not need

    try:
        with Client(args.uri, timeout_s=args.timeout, credentials=_credentials(args)) as client:
            getattr(commands, args.command)(client, args)
            sys.stdout.flush()
    except BrokenPipeError:
        # otherwise the interpreter fails to flush when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (DataPlaneError, OSError) as error:
        print(f"dataplane {args.command}: {describe_error(error)}", file=sys.stderr)
        return 1
    return 0


def _add_client_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    """Add the parser of a command that calls a node, with the options that all of these commands have, and return
    it."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=text, description=text, epilog=_EXAMPLES, formatter_class=formatter)
    uri = os.environ.get("DATAPLANE_URI", DEFAULT_URI)
    parser.add_argument("--uri", default=uri, help=f"address of the node, default $DATAPLANE_URI or {DEFAULT_URI}")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="send the first token in this file; default $DATAPLANE_TOKEN_FILE",
    )
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="PEM",
        help="the CA that signed the node's certificate; default $DATAPLANE_TLS_CA",
    )
    parser.add_argument(
        "--tls-cert", type=Path, metavar="PEM", help="this client's certificate; default $DATAPLANE_TLS_CERT"
    )
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="the key of --tls-cert; default $DATAPLANE_TLS_KEY")
    parser.add_argument(
        "--timeout", type=parse_seconds, default=300.0, help="seconds to wait for the node, default 300"
    )
    return parser


def _credentials(args: argparse.Namespace) -> Credentials:
    """Return the credentials: those of the command line, and those of the environment for what it does not give."""
    given = Credentials.from_environment()
    return replace(
        given,
        token_file=args.token_file or given.token_file,
        tls_ca=args.tls_ca or given.tls_ca,
        tls_cert=args.tls_cert or given.tls_cert,
        tls_key=args.tls_key or given.tls_key,
    )
