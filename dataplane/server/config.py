"""The configuration of a node, and its checks, which run before anything is made. Each error names the flag of `serve`
to change."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.client.connect import Credentials
from dataplane.client.download import NUM_STREAMS
from dataplane.core.errors import BadRequestError
from dataplane.core.hosts import check_id, default_host_id, new_node_id
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.server.auth import Security, is_wildcard
from dataplane.server.call_limits import CallLimits
from dataplane.server.scope_owners import GRACE_S
from dataplane.storage.arena import SHM_DIR
from dataplane.storage.numa import NumaPolicy

DEFAULT_SPILL_BYTES = 10 << 30
MIN_MEMORY_BYTES = 1 << 20
MIN_SPILL_BYTES = 1 << 20

_ADDRESS = re.compile(r"(?:grpc|grpc\+tcp|grpc\+tls|grpcs)://(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+):([0-9]{1,5})/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The settings of a node."""

    memory_bytes: int
    """The byte budget of the arena, which is taken from `/dev/shm` at the start."""
    host: str = "127.0.0.1"
    port: int = 0
    """The port of Flight; 0 takes any free port."""
    roots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The datasets: from a dataset id to paths, globs or fsspec URLs of tars, Parquet, JSON lines, or a Hugging Face
    folder."""
    media_roots: Sequence[Path] = ()
    """Additional folders whose files JSON lines and tables may name. The folders of `roots` are always allowed."""
    index_dir: Path | None = None
    """The folder in which the indices of tars are kept for later nodes; None keeps none."""
    num_workers: int = 1
    limits: MediaLimits = DEFAULT_LIMITS
    """The limits of a medium; larger media are refused."""
    shm_dir: Path = SHM_DIR
    node_id: str = field(default_factory=new_node_id)
    """The name of the node in refs. A node that starts again with the same id is the same home of its objects."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """The addresses of other nodes by id. Objects are fetched from them."""
    directory: Path | None = None
    """The folder in which nodes find each other. Only the user of the node may write to it."""
    advertise: str = ""
    """The address that other nodes use; empty if they use the one at which this node listens."""
    peer_credentials: Credentials | None = None
    """The credentials that this node sends to other nodes; None takes them from the environment."""
    num_streams: int = NUM_STREAMS
    """The number of connections over which a big object is fetched from another node."""
    host_id: str = field(default_factory=default_host_id)
    """The id of the machine. Readers, writers and nodes share memory only if their host ids are equal."""
    security: Security = field(default_factory=Security)
    """The settings for tokens and TLS."""
    spill_dir: Path | None = None
    """The folder for objects that have no room in memory, and for durable ones; None keeps everything in memory."""
    spill_bytes: int = DEFAULT_SPILL_BYTES
    """The byte budget of the files in `spill_dir`."""
    numa: NumaPolicy | None = None
    """The NUMA policy of the arena's pages; None leaves it to the system."""
    scope_grace_s: float = GRACE_S
    """The time in seconds that a client may take to come back after its connection broke; then its scopes close."""
    call_limits: CallLimits = field(default_factory=CallLimits)
    """The limits on the load that clients may cause."""
    metrics_port: int | None = None
    """The HTTP port of `/metrics`; 0 takes any free port, None serves no metrics."""


def check_config(config: NodeConfig) -> None:
    """Raise BadRequestError for the first setting with which the node could not work."""
    _check_host(config.host)
    config.security.check_host(config.host)
    config.security.server_options()
    config.call_limits.check()
    _check_range("--port", config.port, 0, 65_535)
    _check_range("--workers", config.num_workers, 1, 1024)
    _check_range("--peer-streams", config.num_streams, 1, 64)
    if config.memory_bytes < MIN_MEMORY_BYTES:
        raise BadRequestError(f"--memory is {config.memory_bytes} bytes; wanted at least 1MiB, for example 1GiB")
    if config.spill_dir is not None and config.spill_bytes < MIN_SPILL_BYTES:
        raise BadRequestError(
            f"--spill-size is {config.spill_bytes} bytes; wanted at least 1MiB, or no --spill {config.spill_dir}"
        )
    for folder in config.media_roots:
        _check_folder("--media-root", folder)
    if config.index_dir is not None and config.index_dir.exists():
        _check_folder("--index-dir", config.index_dir)
    _check_peers(config)


def check_address(flag: str, uri: str) -> None:
    """Raise BadRequestError unless `uri` names a host and a port that a Flight client can connect to."""
    match = _ADDRESS.fullmatch(uri)
    if match is None or not 0 < int(match[1]) <= 65_535:
        raise BadRequestError(f"{flag} gives the address {uri!r}; wanted grpc://HOST:PORT or grpc+tls://HOST:PORT")


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise BadRequestError(
            f"--host is {host!r}, which is no address ({what}); wanted one of this machine's, such as 127.0.0.1"
        ) from error


def _check_peers(config: NodeConfig) -> None:
    try:
        check_id(config.node_id, "node id")
        check_id(config.host_id, "host id")
    except ValueError as error:
        raise BadRequestError(f"{error}; change --node-id or --host-id") from error
    if config.advertise:
        check_address("--advertise", config.advertise)
    elif config.directory is not None and is_wildcard(config.host):
        raise BadRequestError(
            f"--directory {config.directory} would tell other nodes {config.host}, which is no address to connect to; "
            "add --advertise grpc://HOST:PORT with one of this machine's (and --port), or choose another --host"
        )
    for node_id, uri in config.peers.items():
        check_address(f"--peer {node_id}=...", uri)
        if node_id == config.node_id:
            raise BadRequestError(
                f"--peer {node_id}={uri} has the id of this node itself; wanted another node's, or another --node-id"
            )
    shown = config.peer_credentials
    if shown is not None and shown.token_file is not None:
        try:
            shown.shown_token()
        except BadRequestError as error:
            raise BadRequestError(f"--peer-token-file (or DATAPLANE_TOKEN_FILE): {error}") from error


def _check_range(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadRequestError(f"{flag} is {value}; wanted {least} to {most}")


def _check_folder(flag: str, folder: Path) -> None:
    if not folder.is_dir():
        found = "is no folder" if folder.exists() else "does not exist"
        raise BadRequestError(f"{flag} {folder} {found}; wanted a folder that is there when the node starts")
