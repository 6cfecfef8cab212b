"""The networks of hosts that are namespaces: one with a long way, and one that is slow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from benchmarks.common.hosts import Hosts

pytestmark = pytest.mark.hosts

NBYTES = 4 << 20
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print(flush=True)
    one, _ = server.accept()
    with one, one.makefile("rb") as lines:
        one.sendall(b"first")
        one.sendall(bytes(range(256)) * (int(lines.readline()) // 256))
"""
CLIENT = """
import socket, sys, time
num = int(sys.argv[2])
began = time.monotonic()
one = socket.create_connection((sys.argv[1], 7000))
connected = time.monotonic()
assert one.recv(5, socket.MSG_WAITALL) == b"first"
one.sendall(b"%d\\n" % num)
asked = time.monotonic()
assert one.recv(num, socket.MSG_WAITALL) == bytes(range(256)) * (num // 256)
print(connected - began, time.monotonic() - asked)
"""


def seconds_between(hosts: Hosts) -> tuple[float, float]:
    """Return the seconds that a connection takes, and then `NBYTES` from the first host to the second."""
    server: Any = hosts[0].start([sys.executable, "-c", SERVER, hosts[0].address], stdout=subprocess.PIPE)
    server.stdout.readline()
    said = hosts[1].run([sys.executable, "-c", CLIENT, hosts[0].address, str(NBYTES)])
    assert server.wait(10) == 0
    connecting, sending = map(float, said.split())
    return connecting, sending


def test_a_relay_carries_every_byte_after_its_delay_until_a_host_is_cut_off() -> None:
    with Hosts(2, delay_s=0.05) as hosts:
        connecting, sending = seconds_between(hosts)
        assert 0.1 <= connecting < 1, "there and back"
        assert 0.1 <= sending < 10
        hosts[1].cut()
        with pytest.raises(subprocess.CalledProcessError):
            hosts[1].run([sys.executable, "-c", CLIENT, hosts[0].address, "0"])


def test_a_limited_host_sends_no_more_than_its_limit() -> None:
    with Hosts(2) as hosts:
        hosts[0].limit(100)
        _, limited = seconds_between(hosts)
        hosts[0].limit(0)
        _, unlimited = seconds_between(hosts)
    assert 0.8 * NBYTES * 8 / 100e6 < limited < 5, "but for the burst"
    assert unlimited < limited
