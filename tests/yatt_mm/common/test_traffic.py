"""Tests of the kernel's count of the bytes that a process sends and receives."""

from __future__ import annotations

import socket
import time

import pytest

from yatt_mm.common.traffic import Traffic

NUM_BYTES = 1_000_000


def pass_on(sender: socket.socket, receiver: socket.socket, nbytes: int) -> None:
    """Send this number of bytes and wait until they have arrived."""
    sender.sendall(bytes(nbytes))
    while nbytes:
        nbytes -= len(receiver.recv(nbytes))


def test_bytes_of_tcp_connections_are_counted_both_ways_and_once() -> None:
    traffic = Traffic()
    one, other = socket.socketpair()
    with one, other, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            traffic.take_bytes()
            one.sendall(b"x" * 1000)  # a Unix socket: not counted
            other.recv(1000)
            for _ in range(10):
                pass_on(sender, receiver, NUM_BYTES // 10)
            moved, deadline = traffic.take_bytes(), time.monotonic() + 10
            while moved < 2 * NUM_BYTES and time.monotonic() < deadline:
                moved += traffic.take_bytes()  # the last bytes count once they are acknowledged
    assert moved == pytest.approx(2 * NUM_BYTES, abs=5000), "sent by one end, received by the other"


def test_bytes_of_a_connection_that_closed_count_as_far_as_it_was_looked_at() -> None:
    traffic = Traffic()
    traffic.take_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(3):
            with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
                pass_on(sender, receiver, NUM_BYTES // 10)
                traffic.look_at(receiver.fileno())
    # what other connections of this process say meanwhile (clients of a node that are idle) counts too
    assert 0 <= traffic.take_bytes() - 3 * NUM_BYTES // 10 < 5000
    assert traffic.take_bytes() < 5000
