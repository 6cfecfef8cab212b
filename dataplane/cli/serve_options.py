"""The command-line options of `serve`, in groups. `serve.py` turns their values into the configuration of a node."""

import argparse
from pathlib import Path

from dataplane.cli.parsers import parse_memory, parse_numa, parse_peer, parse_port, parse_root, parse_workers
from dataplane.client.download import NUM_STREAMS
from dataplane.core.hosts import DEFAULT_PORT
from dataplane.core.units import format_bytes
from dataplane.media.limits import DEFAULT_LIMITS
from dataplane.server.call_limits import CallLimits


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add all options of `serve` to its parser."""
    _add_memory(parser.add_argument_group("memory and disk"))
    _add_datasets(parser.add_argument_group("data sets and decoding"))
    _add_callers(parser.add_argument_group("addresses and access"))
    _add_call_limits(parser.add_argument_group("limits on clients"))
    _add_hosts(parser.add_argument_group("several hosts"))
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)


def _add_memory(group: "argparse._ArgumentGroup") -> None:
    """Add the options for memory and disk."""
    group.add_argument("--memory", type=parse_memory, default="1GiB", help="byte budget in /dev/shm, default 1GiB")
    group.add_argument(
        "--spill",
        type=Path,
        metavar="DIR",
        help="a folder for objects that have no room in memory, and for durable objects (put --durable)",
    )
    group.add_argument("--spill-size", type=parse_memory, help="byte budget of the files in --spill, default 10GiB")
    group.add_argument(
        "--numa", type=parse_numa, metavar="POLICY", help="interleave or bind:N: the NUMA nodes of the memory's pages"
    )


def _add_datasets(group: "argparse._ArgumentGroup") -> None:
    """Add the options for data sets and decoding."""
    group.add_argument(
        "--root",
        type=parse_root,
        action="append",
        default=[],
        metavar="NAME=GLOB",
        help="a dataset that clients may read: its name, and its tars, Parquet, JSON lines or folder; repeatable",
    )
    group.add_argument(
        "--media-root",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder whose files JSON lines and tables may name, in addition to those of --root; repeatable",
    )
    group.add_argument(
        "--index-dir",
        type=Path,
        metavar="DIR",
        help="keep the indices of tars there, so that a later start need not read all their headers",
    )
    group.add_argument("--workers", type=parse_workers, default=1, help="processes that decode media, default 1")
    limits = DEFAULT_LIMITS
    group.add_argument(
        "--max-image-pixels",
        type=int,
        default=limits.max_image_pixels,
        metavar="N",
        help=f"refuse images and video frames with more pixels, default {limits.max_image_pixels:,}",
    )
    group.add_argument(
        "--max-media-bytes",
        type=parse_memory,
        default=limits.max_media_bytes,
        metavar="SIZE",
        help=f"refuse images and videos with more encoded bytes, default {format_bytes(limits.max_media_bytes)}",
    )
    group.add_argument(
        "--max-video-frames",
        type=int,
        default=limits.max_video_frames,
        metavar="N",
        help=f"refuse videos with more frames, sampled or not, default {limits.max_video_frames:,}",
    )
    group.add_argument(
        "--max-decode-seconds",
        type=float,
        default=limits.max_decode_seconds,
        metavar="SECONDS",
        help=f"refuse an image or a video that takes a worker longer to decode, default {limits.max_decode_seconds:g}",
    )


def _add_callers(group: "argparse._ArgumentGroup") -> None:
    """Add the options for addresses, tokens and TLS."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at, default 127.0.0.1; beyond loopback it needs --token-file or --tls-ca",
    )
    group.add_argument(
        "--port",
        type=parse_port,
        default=DEFAULT_PORT,
        help=f"port to listen at, default {DEFAULT_PORT}; 0 takes a free one",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="clients must send a token of this file; its lines are TOKEN [read|write|admin] [EXPIRY]",
    )
    group.add_argument(
        "--tls-cert",
        type=Path,
        metavar="PEM",
        help="the node's certificate; with it the node speaks TLS only, and still lets every caller in: add "
        "--token-file or --tls-ca",
    )
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="the private key of --tls-cert")
    group.add_argument("--tls-ca", type=Path, metavar="PEM", help="clients must show a certificate that this CA signed")
    group.add_argument(
        "--insecure", action="store_true", help="let other hosts connect without tokens or client certificates"
    )
    group.add_argument(
        "--metrics-port",
        type=parse_port,
        metavar="P",
        help="serve counters over HTTP for Prometheus at this port; 0 takes a free one",
    )


def _add_call_limits(group: "argparse._ArgumentGroup") -> None:
    """Add the options for limits on calls, streams, leases and messages."""
    limits = CallLimits()
    group.add_argument(
        "--max-calls",
        type=int,
        default=limits.max_calls,
        metavar="N",
        help=f"calls at once, default {limits.max_calls:,}",
    )
    group.add_argument(
        "--max-streams",
        type=int,
        default=limits.max_streams,
        metavar="N",
        help=f"open streams at once, default {limits.max_streams:,}",
    )
    group.add_argument(
        "--max-leases",
        type=int,
        default=limits.max_leases,
        metavar="N",
        help=f"leases of all readers together, default {limits.max_leases:,}",
    )
    group.add_argument(
        "--max-message",
        type=parse_memory,
        default=limits.max_message_bytes,
        metavar="SIZE",
        help=f"bytes in one batch of a DoPut, default {format_bytes(limits.max_message_bytes)}",
    )


def _add_hosts(group: "argparse._ArgumentGroup") -> None:
    """Add the options for several hosts: ids, other nodes and their addresses."""
    group.add_argument(
        "--node-id", metavar="ID", help="the id in this node's refs; keep it over restarts; default: random"
    )
    group.add_argument(
        "--host-id", metavar="ID", help="clients with this host id share memory with the node; default: this machine's"
    )
    group.add_argument(
        "--peer",
        type=parse_peer,
        action="append",
        default=[],
        metavar="ID=URI",
        help="another node and its address, from which objects are fetched; repeatable",
    )
    group.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="a folder (mode 0700) in which nodes write and find each other's addresses",
    )
    group.add_argument("--advertise", default="", metavar="URI", help="the address that other nodes use for this one")
    group.add_argument(
        "--peer-token-file", type=Path, metavar="FILE", help="the token that this node sends to other nodes"
    )
    group.add_argument(
        "--peer-streams",
        type=int,
        default=NUM_STREAMS,
        metavar="N",
        help="connections to fetch a big object, default half the cores, 1 to 4",
    )
