"""Running a node as a process of its own: started by a person, or embedded in the process that started it.

A person's node stops on Ctrl-C or SIGTERM. An embedded node ignores Ctrl-C (its owner decides) and stops on SIGTERM, or
when its owner is gone: its standard input closes, or the kernel signals the death of the owner.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from types import FrameType

from dataplane.client.connect import Credentials
from dataplane.core.errors import BadRequestError, DataPlaneError, DatasetError
from dataplane.core.hosts import default_host_id, new_node_id
from dataplane.core.os_errors import describe_error
from dataplane.core.process import signal_on_parent_death
from dataplane.core.units import format_bytes
from dataplane.datasets.roots import find_dataset_files
from dataplane.media.limits import MediaLimits
from dataplane.server.auth import Security
from dataplane.server.call_limits import CallLimits
from dataplane.server.config import DEFAULT_SPILL_BYTES, NodeConfig
from dataplane.server.node import Node

log = logging.getLogger(__name__)


def serve(args: argparse.Namespace) -> int:
    """Run a node until it is told to stop; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="dataplane %(levelname)s %(message)s", stream=sys.stderr)
    _raise_file_limit()
    stop = _Stop(is_embedded=args.embedded)
    try:
        node = Node(_config(args))
    except (DataPlaneError, OSError) as error:
        if args.embedded:
            _say({"error": type(error).__name__, "message": describe_error(error)})
        else:
            print(f"dataplane serve: {describe_error(error)}", file=sys.stderr)
        return 1
    try:
        if args.embedded:
            stop.watch_owner()
            _say(
                {"uri": node.uri, "pid": os.getpid(), "node": node.services.node_id, "segments": node.services.segments}
            )
        else:
            _greet(node, args)
            _warn_of_empty_roots(args)
        stop.wait()
    finally:
        node.stop()
    if not args.embedded:
        print(f"dataplane: stopped ({stop.reason}); shared memory is given back", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # streams of readers that are still open would keep gRPC's threads, and so the process


def _config(args: argparse.Namespace) -> NodeConfig:
    if args.spill is None and args.spill_size is not None:
        raise BadRequestError("--spill-size says how much, not where; wanted --spill DIR beside it")
    roots: dict[str, list[str]] = defaultdict(list)
    for name, pattern in args.root:
        roots[name].append(pattern)
    return NodeConfig(
        memory_bytes=args.memory,
        host=args.host,
        port=args.port,
        peer_port=args.peer_port,
        roots=dict(roots),
        media_roots=args.media_root,
        num_workers=args.workers,
        spill_dir=args.spill,
        spill_bytes=DEFAULT_SPILL_BYTES if args.spill_size is None else args.spill_size,
        numa=args.numa,
        node_id=args.node_id or new_node_id(),
        host_id=args.host_id or default_host_id(),
        security=Security(
            token_file=args.token_file,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
            tls_ca=args.tls_ca,
            is_insecure=args.insecure,
        ),
        limits=_limits(args),
        metrics_port=args.metrics_port,
        call_limits=CallLimits(
            max_calls=args.max_calls,
            max_streams=args.max_streams,
            max_leases=args.max_leases,
            max_message_bytes=args.max_message,
        ),
        peers=dict(args.peer),
        directory=args.directory,
        advertise=args.advertise,
        num_streams=args.peer_streams,
        peer_credentials=_peer_credentials(args),
    )


def _peer_credentials(args: argparse.Namespace) -> Credentials:
    """What other nodes are shown: what the command line says, else the environment."""
    told = Credentials.from_environment()
    return replace(
        told,
        token_file=args.peer_token_file or told.token_file,
        tls_ca=args.tls_ca or told.tls_ca,
        tls_cert=args.tls_cert or told.tls_cert,
        tls_key=args.tls_key or told.tls_key,
    )


def _limits(args: argparse.Namespace) -> MediaLimits:
    try:
        return MediaLimits(
            max_image_pixels=args.max_image_pixels,
            max_media_bytes=args.max_media_bytes,
            max_video_frames=args.max_video_frames,
            max_decode_seconds=args.max_decode_seconds,
        )
    except ValueError as error:
        raise BadRequestError(str(error)) from error


def _raise_file_limit() -> None:
    """Let this process open what the system lets it: every connection takes a descriptor, and so do files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of open files stays as it is (%s)", error)


class _Stop:
    """Why the node is told to stop. A pipe, not an Event: handlers may set it, and any thread may take the signal."""

    def __init__(self, *, is_embedded: bool) -> None:
        self.reason = ""
        self._owner = os.getppid()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        if is_embedded:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, self._on_parent_death)
            signal_on_parent_death(signal.SIGUSR1)
        else:
            signal.signal(signal.SIGINT, self._on_signal)
            signal.signal(signal.SIGHUP, self._on_signal)

    def wait(self) -> None:
        """Waits for: a signal that means stop, or the end of the owner. Only in the main thread."""
        while not self.reason:
            os.read(self._readable, 512)  # returns on any signal; its handler has run before the next line does

    def watch_owner(self) -> None:
        """Stop when standard input ends: its other end is the owner's."""

        def wait_for_end() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            self.reason = "its owner is gone"
            os.write(self._writable, b"x")

        threading.Thread(target=wait_for_end, name="owner", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _on_parent_death(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._owner:  # the signal also comes when only the thread that started us has ended
            self.reason = "its owner is gone"


def _say(message: dict[str, object]) -> None:
    """The one line an owner reads."""
    print(json.dumps(message), flush=True)


def _warn_of_empty_roots(args: argparse.Namespace) -> None:
    """Say now what a client would learn at its first ingest; remote roots are not asked."""
    for name, pattern in args.root:
        if "://" not in pattern:
            try:
                find_dataset_files(name, [pattern])
            except DatasetError as error:
                log.warning("%s", error)


def _greet(node: Node, args: argparse.Namespace) -> None:
    datasets = ", ".join(sorted({name for name, _ in args.root})) or "none"
    print(
        f"dataplane: serving at {node.uri} with {format_bytes(args.memory)} of shared memory, {args.workers} worker(s)"
    )
    if node.metrics_url:
        print(f"dataplane: counts at {node.metrics_url}/ and {node.metrics_url}/metrics")
    print(f"dataplane: datasets: {datasets}. Stop with Ctrl-C.", flush=True)
