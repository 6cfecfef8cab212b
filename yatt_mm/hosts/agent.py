"""The Ray actor of a run on each of its other hosts: it starts the process that keeps what the run has there, looks
whether the host has what the run needs, and reaches processes there for others.

Importing this is cheap: every process that gets the handle of an actor imports its class.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.log_file import write_output_to
from yatt_mm.common.owned_dirs import remove_orphans
from yatt_mm.common.progress import Done, progress_of, signal_part
from yatt_mm.hosts.host_needs import HostNeeds
from yatt_mm.hosts.host_traffic import HostTraffic
from yatt_mm.hosts.orders import HostOrder, HostReady, NodeNews
from yatt_mm.placement.state_changes import StateChange, change_on_host
from yatt_mm.protocol.placement_model import State

START_S = 100.0
"""The seconds in which a host's folders and node must be there: fewer than `start_hosts.CHECK_S`, so that a host says
itself what it lacks."""
END_S = 20.0
"""The seconds in which they must be gone."""
CONNECT_S = 5.0
"""The seconds in which another host must answer."""
MOST_AT_ONCE = 64
"""The most hosts that are tried at the same time."""


class HostAgent:
    """The body of the actor. Its methods run in threads."""

    def __init__(self, *, order: HostOrder, address: str) -> None:
        self._order = order
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._news = NodeNews()
        self._listener: socket.socket | None = None
        self._traffic: HostTraffic | None = None
        self._workers: dict[str, Any] = {}

    def look(self, needs: HostNeeds) -> list[str]:
        """Return what this host lacks of what the run needs."""
        return needs.missing()

    def start(self) -> HostReady:
        """Make folders and node. Raises WorkerError with what the host says if they cannot be made."""
        write_output_to(self._order.log_dir / f"host-{self._order.number}.log")
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "yatt_mm.hosts.host_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{self._order.text()}\n".encode())
        process.stdin.flush()
        if not select.select([process.stdout], [], [], START_S)[0]:
            raise WorkerError(f"its data-plane node was not ready after {START_S:g} s")
        ready = json.loads(process.stdout.readline() or b'{"error": "the process for it ended; its log says why"}')
        if "error" in ready:
            raise WorkerError(ready["error"])
        process.wait()  # it goes on in a child
        threading.Thread(target=self._read_news, daemon=True, name="host's news").start()
        return HostReady(uri=ready["uri"], interface=interface_of(self._address))

    def _read_news(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._news = NodeNews(**json.loads(line))
        self._news = replace(self._news, failure=self._news.failure or "the process that keeps its node has ended")

    def news(self) -> NodeNews:
        """Return what has happened to the node."""
        return self._news

    def listen(self) -> int:
        """Listen at any port of this host's address until `reach` was tried by the others, and return the port."""
        self._listener = listen_at(self._address)
        return int(self._listener.getsockname()[1])

    def reach(self, others: Mapping[str, tuple[str, int]]) -> list[str]:
        """Return the names of the hosts whose (address, port) this host cannot reach, each with the reason."""
        return unreachable(others)

    def stop_listening(self) -> None:
        """End `listen`."""
        if self._listener is not None:
            self._listener.close()

    def count_sent(self, addresses: Sequence[str]) -> None:
        """Count from now on what this host sends to these hosts, of which it may be one."""
        with contextlib.suppress(OSError):
            self._traffic = HostTraffic([address for address in addresses if address != self._address])

    def take_sent_bytes(self) -> int | None:
        """Return the bytes that this host sent to the others since the last call; None if its kernel does not say."""
        return None if self._traffic is None else self._traffic.take_bytes()

    def done(self, names: Sequence[str]) -> list[Done | None]:
        """Return what these parts of the run have done; None for those that are not on this host."""
        return [progress_of(name, self._order.scratch.files) for name in names]

    def take_units(self, workers: Mapping[str, Any]) -> None:
        """Take the actors of the host's units, by the names of the units, for `set_state`."""
        self._workers = dict(workers)

    def set_state(self, names: Sequence[str], state: State, deadline_s: float) -> list[StateChange]:
        """Change the state of these units, and return what each of them says. Raises WorkerError if one of them failed,
        or did not reply in time."""
        return change_on_host({name: self._workers[name] for name in names}, state, deadline_s=deadline_s)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the process of a part of the run, if it is on this host."""
        signal_part(name, number, self._order.scratch.files)

    def stop(self) -> None:
        """End the node, and remove the folders, also if the process for it was killed. Raises WorkerError if that takes
        too long."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        deadline_s = time.monotonic() + END_S
        while self._order.scratch.files.exists():
            if self._news.failure:
                for folder in (self._order.scratch.files, self._order.scratch.weights):
                    remove_orphans(folder.parent, folder.name)
            if time.monotonic() > deadline_s:
                raise WorkerError(f"{self._order.scratch.files} was there {END_S:g} s after the end")
            time.sleep(0.05)


def interface_of(address: str) -> str:
    """Return the name of the network device that has this address. Raises WorkerError if none has."""
    import psutil

    devices: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in devices.items():
        if any(one.address == address for one in addresses):
            return name
    raise WorkerError(f"no network device has the address {address} that Ray has for this host")


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at any port of this host's address."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def unreachable(others: Mapping[str, tuple[str, int]]) -> list[str]:
    """Return the names of the hosts whose (address, port) cannot be reached from here, each with the reason."""

    def look(one: tuple[str, tuple[str, int]]) -> str:
        name, (address, port) = one
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            return f"{name} at port {port} ({_reason(error)})"
        return ""

    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        return [found for found in pool.map(look, others.items()) if found]


def _reason(error: OSError) -> str:
    """Return the reason of an error of a connection."""
    return error.strerror or str(error) or type(error).__name__
