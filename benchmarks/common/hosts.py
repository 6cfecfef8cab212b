"""Hosts on one machine: namespaces of the network, of mounts, of processes and of the hostname, on a bridge. Needs
root.

Each host has an address, a hostname, processes, `/dev/shm` and `/tmp` of its own; all other files are those of the
machine, as on a shared filesystem. Everything is removed at the end, and no process of a host outlives its maker.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.common.relay import Relay
from dataplane.core.hosts import HOST_ID_VARIABLE

_HOLD = """
mount -t tmpfs -o mode=1777 shm /dev/shm && mount -t tmpfs -o mode=1777 tmp /tmp && hostname {name} && echo && read
"""
"""What the first process of a host does: the host ends when its standard input closes."""
OWN_FOLDERS = ("/dev/shm", "/tmp")
"""The folders that every host has for itself."""
DEVICE = "eth0"
"""The name of a host's network device."""


def why_not_allowed() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if os.geteuid():
        return "hosts are network namespaces, which only root can make; run this as root"
    name = f"yt{secrets.token_hex(3)}-try"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except OSError as error:
        return f"hosts need `ip` (Debian's iproute2): {error}"
    except subprocess.CalledProcessError as error:
        return f"this kernel or container allows no network namespaces: {error.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What passed a host's network device, in bytes with all headers."""

    received: int
    sent: int


class Host:
    """One host."""

    def __init__(self, *, name: str, space: str, address: str) -> None:
        """`space`: the name of its network namespace."""
        self.name = name
        self.address = address
        self._space = space
        self.start_up()

    def start_up(self) -> None:
        """Start the host, for the first time or after `kill`. Raises OSError if its folders cannot be made."""
        self._holder = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._space, "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "bash", "-c", _HOLD.format(name=self.name)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.kill()
            raise OSError(f"the folders of {self.name} could not be made; see above")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._first = int(children[0])
        """The number of the host's first process, with which all of its processes end."""

    def command(self, command: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the words that run a command on this host, in the working directory of the caller or another one."""
        spaces = ("--net", "--mount", "--uts", "--pid")
        return ["nsenter", f"--target={self._first}", *spaces, f"--wd={cwd or Path.cwd()}", *command]

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return an environment in which processes know this host from others."""
        return {**(os.environ if environ is None else environ), HOST_ID_VARIABLE: self.name, "TMPDIR": "/tmp"}

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> Any:
        """Start a process on this host, and return its handle."""
        return subprocess.Popen(self.command(command, cwd), env=self.environ(environ), **options)

    def run(self, command: Sequence[str], **options: Any) -> str:
        """Run a command on this host, and return what it prints. Raises CalledProcessError."""
        process = subprocess.run(
            self.command(command), env=self.environ(), check=True, stdout=subprocess.PIPE, text=True, **options
        )
        return process.stdout

    def counters(self) -> Counters:
        """Return what has passed the host's network device so far."""
        (found,) = json.loads(_ip("-n", self._space, "-s", "-j", "link", "show", DEVICE))
        bytes_of = {way: int(found["stats64"][way]["bytes"]) for way in ("rx", "tx")}
        return Counters(received=bytes_of["rx"], sent=bytes_of["tx"])

    def limit(self, mbit_per_s: int) -> None:
        """Let the host send no more than this from now on; 0 takes the limit away."""
        rate = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "400ms") if mbit_per_s else ("pfifo",)
        _ip("netns", "exec", self._space, "tc", "qdisc", "replace", "dev", DEVICE, "root", *rate)

    def cut(self) -> None:
        """Take the host's network device down."""
        _ip("-n", self._space, "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """Bring the host's network device up again."""
        _ip("-n", self._space, "link", "set", DEVICE, "up")

    def kill(self) -> None:
        """End all processes of the host at once, as if its power were gone: the kernel ends them with the first."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.kill()
        self._holder.wait()
        self._holder.stdin.close()
        self._holder.stdout.close()

    def files(self) -> list[str]:
        """Return the paths of all that is in the host's own folders."""
        return sorted(self.run(["find", *OWN_FOLDERS, "-mindepth", "1"]).split())

    def processes(self) -> list[str]:
        """Return the number and the command line of every process on the host but the first."""
        space = Path(f"/proc/{self._first}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or int(entry.name) == self._first or (entry / "ns/pid").readlink() != space:
                    continue
                words = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")
                found.append(f"{entry.name} {words[:200].strip()}")
            except OSError:  # it has ended
                continue
        return found


class Hosts:
    """Some hosts on a network of their own, which no other one reaches. All are removed at the end of the block."""

    def __init__(self, num: int, *, delay_s: float = 0.0) -> None:
        """`delay_s`: what a packet takes from one to another. Then a relay in this process carries the packets, and
        otherwise a bridge of the kernel."""
        self._num = num
        self._relay = Relay(delay_s) if delay_s else None
        self._tag = f"yt{secrets.token_hex(3)}"
        self._net = f"10.213.{secrets.randbelow(256)}"
        self._stack = ExitStack()
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        try:
            if self._relay:
                self._stack.callback(self._relay.close)
                connect = self._connect_to_relay
            else:
                connect = self._bridge()
            for number in range(self._num):
                self._hosts.append(self._make(number, connect))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def _make(self, number: int, connect: Callable[[int, str, str], None]) -> Host:
        space, name, address = self._space(str(number)), f"host{number}", f"{self._net}.{number + 1}"
        connect(number, space, address)
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _ip("-n", space, "link", "set", device, "up")
        host = Host(name=name, space=space, address=address)
        self._stack.callback(host.kill)
        return host

    def _bridge(self) -> Callable[[int, str, str], None]:
        """Make a bridge, and return what connects the network device of a host to it."""
        bridge = self._space("bridge")
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")

        def connect(number: int, space: str, address: str) -> None:
            port = f"port{number}"
            _ip("link", "add", DEVICE, "netns", space, "type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")

        return connect

    def _connect_to_relay(self, number: int, space: str, address: str) -> None:
        """Make a host's network device, whose packets the relay carries."""
        assert self._relay is not None
        name = f"{self._tag}t{number}"
        self._relay.add(name, address)
        _ip("link", "set", name, "netns", space, "name", DEVICE)
        _ip("-n", space, "link", "set", DEVICE, "mtu", str(self._relay.mtu))

    def _space(self, name: str) -> str:
        """Make a network namespace, which goes at the end, and return its name."""
        space = f"{self._tag}-{name}"
        _ip("netns", "add", space)
        self._stack.callback(_ip, "netns", "delete", space)
        return space


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, text=True).stdout
