"""Tests of the count of what this host sends to others. The other host is another address of this one."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import pytest

from tests.dataplane.shards import wait_until
from tests.yatt_mm.common.test_traffic import NUM_BYTES, pass_on
from yatt_mm.common.traffic import SentToHosts
from yatt_mm.hosts.host_traffic import HostTraffic
from yatt_mm.training.sent_bytes import SentBytes

OTHER = str(ip_address((127 << 24) + (1 << 22) + os.getpid()))
"""An address of this process alone: the bytes of all processes to an address are counted."""


@pytest.fixture
def server() -> socket.socket:
    return socket.create_server((OTHER, 0))


@pytest.mark.parametrize("count", [lambda: HostTraffic([OTHER]), SentToHosts], ids=["of the host", "of the process"])
def test_what_is_sent_to_another_host_is_counted_and_what_comes_back_is_not(server: socket.socket, count) -> None:  # type: ignore[no-untyped-def]
    with server, socket.create_server(("127.0.0.1", 0)) as near:
        with socket.create_connection(server.getsockname()) as before, server.accept()[0] as there:
            pass_on(before, there, 500)
            traffic = count()
            traffic.take_bytes()
            with socket.create_connection(near.getsockname()) as here, near.accept()[0] as own:
                pass_on(here, own, NUM_BYTES)
            pass_on(before, there, NUM_BYTES // 10)
            assert traffic.take_bytes() == NUM_BYTES // 10
            assert traffic.take_bytes() == 0


def test_bytes_of_a_connection_that_has_ended_stay_counted(server: socket.socket) -> None:
    traffic = HostTraffic([OTHER])
    with server:
        for num in (1, 2):
            with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
                pass_on(sender, receiver, NUM_BYTES // 10)
                # what is taken is looked at by that itself; here the thread must have looked
                wait_until(lambda wanted=num * (NUM_BYTES // 10): traffic._untaken == wanted)
    assert traffic.take_bytes() == 2 * (NUM_BYTES // 10)


def test_a_socket_of_the_newer_protocol_that_speaks_the_older_one_counts(server: socket.socket) -> None:
    traffic = HostTraffic([OTHER])
    with server, socket.socket(socket.AF_INET6) as sender:
        sender.connect((f"::ffff:{OTHER}", server.getsockname()[1]))
        with server.accept()[0] as receiver:
            pass_on(sender, receiver, NUM_BYTES // 10)
            assert traffic.take_bytes() == NUM_BYTES // 10


def test_a_rank_counts_by_the_kind_of_its_work(server: socket.socket) -> None:
    sent, none = SentBytes(is_counted=True), SentBytes(is_counted=False)
    with server, socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
        for kind, num in (("gradients", 3000), ("weights", 200), ("gradients", 10)):
            pass_on(sender, receiver, 7)  # of no kind
            with sent.of(kind), none.of(kind):
                pass_on(sender, receiver, num)
    assert sent.take() == {"gradients": 3010, "weights": 200} and sent.take() == {}
    assert none.take() == {}
