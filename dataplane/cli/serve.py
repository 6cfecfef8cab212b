"""The command `serve`: run a node until it is told to stop, from a terminal or embedded (as the child of its owner).

A node that runs from a terminal stops on Ctrl-C, SIGTERM or SIGHUP. An embedded node ignores Ctrl-C, because its owner
decides. It stops on SIGTERM, or when its owner is gone: its standard input closes, or the system signals it.
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
    """Run a node until it is told to stop, then exit the process with 0. Return 1 if the node cannot start."""
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
        print(f"dataplane: stopped ({stop.reason}); its shared memory is freed", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would wait for gRPC's threads, which wait for the streams that readers still have open


def _config(args: argparse.Namespace) -> NodeConfig:
    """Return the configuration of the node from the parsed arguments. BadRequestError if they do not fit together."""
    if args.spill is None and args.spill_size is not None:
        raise BadRequestError("--spill-size needs a folder: add --spill DIR")
    roots: dict[str, list[str]] = defaultdict(list)
    for name, pattern in args.root:
        roots[name].append(pattern)
    return NodeConfig(
        memory_bytes=args.memory,
        host=args.host,
        port=args.port,
        roots=dict(roots),
        media_roots=args.media_root,
        index_dir=args.index_dir,
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
    """Return what this node sends to other nodes: the command line's credentials, else those of the environment."""
    told = Credentials.from_environment()
    return replace(
        told,
        token_file=args.peer_token_file or told.token_file,
        tls_ca=args.tls_ca or told.tls_ca,
        tls_cert=args.tls_cert or told.tls_cert,
        tls_key=args.tls_key or told.tls_key,
    )


def _limits(args: argparse.Namespace) -> MediaLimits:
    """Return the limits on media from the parsed arguments. BadRequestError if one is out of range."""
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
    """Raise the limit of open files to the system's maximum: every connection and every file needs a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of open files could not be raised (%s)", error)


class _Stop:
    """The stop of the node: waits for a signal or the end of the owner, and keeps the reason.

    It uses a pipe instead of a threading.Event: signal handlers can write to a pipe, and any thread may get a signal.
    """

    def __init__(self, *, is_embedded: bool) -> None:
        self.reason = ""
        """Why the node stops, in words; empty while it runs."""
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
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` lets a node outlive its terminal
                signal.signal(signal.SIGHUP, self._on_signal)

    def wait(self) -> None:
        """Wait until there is a reason to stop. Call it only in the main thread.

        Waits for: a signal that means stop, or the end of the owner.
        """
        while not self.reason:
            os.read(self._readable, 512)  # returns on any signal, and the signal's handler runs before the next line

    def watch_owner(self) -> None:
        """Stop the node when its standard input ends, because the owner holds the other end of the pipe."""

        def wait_for_end() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            self.reason = "its owner is gone"
            os.write(self._writable, b"x")

        threading.Thread(target=wait_for_end, name="owner", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: stop the node."""
        self.reason = signal.Signals(number).name

    def _on_parent_death(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: stop the node if its owner is really gone."""
        if (
            os.getppid() != self._owner
        ):  # the signal also comes when only the owner's thread that started the node has ended
            self.reason = "its owner is gone"


def _say(message: dict[str, object]) -> None:
    """Print the one line of JSON that the owner of an embedded node reads."""
    print(json.dumps(message), flush=True)


def _warn_of_empty_roots(args: argparse.Namespace) -> None:
    """Warn of data sets that a client could not ingest. Remote roots are not checked."""
    for name, pattern in args.root:
        if "://" not in pattern:
            try:
                find_dataset_files(name, [pattern])
            except DatasetError as error:
                log.warning("%s", error)


def _greet(node: Node, args: argparse.Namespace) -> None:
    """Print the address of the node and what it serves."""
    datasets = ", ".join(sorted({name for name, _ in args.root})) or "none"
    print(
        f"dataplane: serving at {node.uri} with {format_bytes(args.memory)} of shared memory, {args.workers} worker(s)"
    )
    if node.metrics_url:
        print(f"dataplane: counts at {node.metrics_url}/metrics")
    print(f"dataplane: datasets: {datasets}. Stop with Ctrl-C.", flush=True)
