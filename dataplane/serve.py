"""Running a node as a process of its own: started by a person, or embedded in the process that started it.

A person's node stops on Ctrl-C or SIGTERM. An embedded node ignores Ctrl-C (its owner decides) and stops on SIGTERM, or
when its owner is gone: its standard input closes, or the kernel signals the death of the owner.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections import defaultdict
from types import FrameType

from dataplane.errors import DataPlaneError
from dataplane.node import Node, NodeConfig
from dataplane.process import signal_on_parent_death
from dataplane.sizes import format_bytes

_POLL_S = 3600.0

log = logging.getLogger(__name__)


def serve(args: argparse.Namespace) -> int:
    """Run a node until it is told to stop; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="dataplane %(levelname)s %(message)s", stream=sys.stderr)
    stopping = threading.Event()
    reason = _stop_on_signals(stopping, is_embedded=args.embedded)
    try:
        node = Node(_config(args))
    except (DataPlaneError, OSError) as error:
        if args.embedded:
            _say({"error": type(error).__name__, "message": str(error)})
        else:
            print(f"dataplane serve: {error}", file=sys.stderr)
        return 1
    try:
        if args.embedded:
            _watch_owner(stopping, reason)
            _say({"uri": node.uri, "pid": os.getpid(), "node": node.node_id, "segments": node.segments})
        else:
            _greet(node, args)
        while not stopping.wait(_POLL_S):
            pass
    finally:
        node.stop()
    if not args.embedded:
        print(f"dataplane: stopped ({reason[-1]}); shared memory is given back", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # streams of readers that are still open would keep gRPC's threads, and so the process


def _config(args: argparse.Namespace) -> NodeConfig:
    roots: dict[str, list[str]] = defaultdict(list)
    for name, pattern in args.root:
        roots[name].append(pattern)
    return NodeConfig(
        memory_bytes=args.memory, host=args.host, port=args.port, roots=dict(roots), num_workers=args.workers
    )


def _stop_on_signals(stopping: threading.Event, *, is_embedded: bool) -> list[str]:
    """Returns the list to which the reason is appended."""
    reason: list[str] = []
    owner = os.getppid()

    def stop(number: int, frame: FrameType | None) -> None:
        reason.append(signal.Signals(number).name)
        stopping.set()

    def stop_if_orphan(number: int, frame: FrameType | None) -> None:
        if os.getppid() != owner:  # the signal also comes when only the thread that started us has ended
            stop(number, frame)

    signal.signal(signal.SIGTERM, stop)
    if is_embedded:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, stop_if_orphan)
        signal_on_parent_death(signal.SIGUSR1)
    else:
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, stop)
    return reason


def _watch_owner(stopping: threading.Event, reason: list[str]) -> None:
    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        reason.append("owner is gone")
        stopping.set()

    threading.Thread(target=wait_for_end, name="owner", daemon=True).start()


def _say(message: dict[str, object]) -> None:
    """The one line an owner reads."""
    print(json.dumps(message), flush=True)


def _greet(node: Node, args: argparse.Namespace) -> None:
    datasets = ", ".join(sorted({name for name, _ in args.root})) or "none"
    print(
        f"dataplane: serving at {node.uri} with {format_bytes(args.memory)} of shared memory, {args.workers} worker(s)"
    )
    print(f"dataplane: datasets: {datasets}. Stop with Ctrl-C.", flush=True)
