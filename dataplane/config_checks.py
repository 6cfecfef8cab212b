"""What a node's owner asked for, checked before anything is made: each message names the flag of `serve` to change."""

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.errors import BadRequestError
from dataplane.hosts import check_id
from dataplane.security import is_wildcard

if TYPE_CHECKING:
    from dataplane.node import NodeConfig

MIN_MEMORY_BYTES = 1 << 20
MIN_SPILL_BYTES = 1 << 20

_ADDRESS = re.compile(r"(?:grpc|grpc\+tcp|grpc\+tls|grpcs)://(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+):([0-9]{1,5})/?")


def check_config(config: "NodeConfig") -> None:
    """Raise BadRequestError for the first thing under which the node could not work as its owner means."""
    _check_host(config.host)
    config.security.check_host(config.host)
    config.security.server_options()
    config.call_limits.check()
    _check_range("--port", config.port, 0, 65_535)
    _check_peer_port(config)
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


def _check_peer_port(config: "NodeConfig") -> None:
    port = config.peer_port
    _check_range("--peer-port", port, 0, 65_535)
    if port and config.security.tls_cert is not None:
        raise BadRequestError(
            f"--peer-port is {port}, but its bytes are in the clear, and with --tls-cert nothing goes in the "
            "clear: leave --peer-port out; other nodes fetch over Flight"
        )
    if port and port in (config.port, config.metrics_port):
        raise BadRequestError(f"--peer-port is {port}, as is --port or --metrics-port; wanted one of its own")


def _check_peers(config: "NodeConfig") -> None:
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
