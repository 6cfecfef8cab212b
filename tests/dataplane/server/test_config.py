"""Tests of the settings that a node refuses before it starts, and of its messages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane.client.connect import Credentials
from dataplane.core.errors import BadRequestError
from dataplane.server.auth import Security
from dataplane.server.config import NodeConfig, check_address, check_config
from tests.dataplane.serving import refused

GOOD = NodeConfig(memory_bytes=1 << 20, node_id="a")
NOPE = Path("/no/such/place")
Change = Callable[[NodeConfig], NodeConfig]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: replace(good, advertise="foo"), "--advertise gives the address 'foo'; wanted grpc://HOST:PORT"),
        (lambda good: replace(good, media_roots=[NOPE]), "--media-root /no/such/place does not exist; wanted a folder"),
        (lambda good: replace(good, media_roots=[Path(__file__)]), "--media-root .* is no folder"),
        (lambda good: replace(good, peers={"b": "grpc://"}), "--peer b=... gives the address 'grpc://'"),
        (lambda good: replace(good, peers={"a": "grpc://h:1"}), "--peer a=grpc://h:1 has the id of this node itself"),
        (lambda good: replace(good, spill_dir=NOPE, spill_bytes=0), "--spill-size is 0 bytes; wanted at least 1MiB"),
        (lambda good: replace(good, memory_bytes=1), "--memory is 1 bytes; wanted at least 1MiB"),
        (lambda good: replace(good, port=70_000), "--port is 70000; wanted 0 to 65535"),
        (lambda good: replace(good, num_workers=0), "--workers is 0; wanted 1 to 1024"),
        (lambda good: replace(good, num_streams=65), "--peer-streams is 65; wanted 1 to 64"),
        (lambda good: replace(good, node_id="-"), "change --node-id or --host-id"),
        (lambda good: replace(good, host="no such host"), "--host is 'no such host', which is no address"),
        (lambda good: replace(good, security=Security(tls_ca=NOPE)), "^--tls-ca without --tls-cert"),
        (lambda good: replace(good, security=Security(tls_key=NOPE)), "^--tls-key without --tls-cert"),
        (
            lambda good: replace(good, peer_credentials=Credentials(token_file=NOPE)),
            "--peer-token-file .*/no/such/place cannot be read",
        ),
    ],
)
def test_what_a_node_cannot_use_is_refused_with_its_flag(change: Change, message: str) -> None:
    check_config(GOOD)
    with pytest.raises(BadRequestError, match=message):
        check_config(change(GOOD))


def test_addresses_name_a_host_and_a_port() -> None:
    for good in ("grpc://127.0.0.1:8815", "grpc+tls://node.example:1", "grpcs://[::1]:65535/", "grpc+tcp://h:80"):
        check_address("--peer", good)
    for bad in (
        "",
        "grpc://h",
        "grpc://:1",
        "grpc://h:0",
        "grpc://h:65536",
        "http://h:1",
        "grpc://u@h:1",
        "grpc://h:1/x",
    ):
        with pytest.raises(BadRequestError, match="wanted grpc://HOST:PORT"):
            check_address("--peer", bad)


def test_the_command_line_refuses_them_in_one_line() -> None:
    for flags in (
        ("--media-root", "/nope"),
        ("--peer-token-file", "/nope"),
        ("--spill-size", "1GiB"),
        ("--node-id", "a", "--peer", "a=grpc://h:1"),
    ):
        message = refused(*flags)
        assert message.startswith("dataplane serve: ") and message.count("\n") == 1 and flags[-2] in message
