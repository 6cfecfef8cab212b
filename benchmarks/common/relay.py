"""A network that takes its time: packets of TUN devices, which a process carries to each other after a delay."""

from __future__ import annotations

import fcntl
import os
import queue
import select
import socket
import struct
import threading
import time
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_DESTINATION = slice(16, 20)
"""Where an IPv4 packet has the address that it goes to."""


class Relay:
    """Carries IPv4 packets between network devices that it makes. All others are dropped."""

    mtu = 9000
    """The largest packet in bytes."""

    def __init__(self, delay_s: float) -> None:
        """`delay_s`: the seconds from one device to another."""
        self._delay_s = delay_s
        self._devices: dict[bytes, int] = {}
        """[address] The descriptor of the device with it."""
        self._waiting: queue.SimpleQueue[tuple[float, int, bytes]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._poll = select.epoll()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def add(self, name: str, address: str) -> None:
        """Make a device whose host has this address. Another namespace may take it. Raises OSError."""
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
        self._devices[socket.inet_aton(address)] = fd
        self._poll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """End the relay. Its devices are gone then."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join()
        self._poll.close()
        for fd in self._devices.values():
            os.close(fd)

    def _read(self) -> None:
        while not self._is_closed.is_set():
            for fd, _ in self._poll.poll(0.1):
                with suppress(OSError):  # no packet is left, or the device is down
                    while packet := os.read(fd, self.mtu):
                        target = self._devices.get(packet[_DESTINATION])
                        if target is not None:
                            self._waiting.put((time.monotonic() + self._delay_s, target, packet))

    def _write(self) -> None:
        while not self._is_closed.is_set():
            with suppress(queue.Empty):
                at_s, target, packet = self._waiting.get(timeout=0.1)
                time.sleep(max(0.0, at_s - time.monotonic()))
                with suppress(OSError):  # its queue is full, or the device is down: the packet is lost
                    os.write(target, packet)
