"""Two hosts on one machine and the link between them: network namespaces if they are allowed, otherwise loopback."""

import json
import secrets
import subprocess
from typing import Any, Protocol, Self

from benchmarks.common.proxy import Proxy


class Link(Protocol):
    """Two hosts, `a` and `b`, and the link between them. The operating system counts the bytes that cross it."""

    name: str
    uris: dict[str, str]
    """The addresses of the nodes by host; filled in when the nodes start."""
    host_ids: dict[str, str]
    is_insecure: bool

    def address(self, host: str) -> str:
        """Return the address at which a host's node listens."""

    def prefix(self, host: str) -> list[str]:
        """Return the words to put before a command so that it runs on a host."""

    def uri_of_a_for_b(self) -> str:
        """Return the address under which host b finds the node of host a, which runs already."""

    def sent_bytes(self) -> int:
        """Return the number of bytes that host a has sent to host b so far."""

    def cut(self) -> None:
        """Break the link: nothing passes any more."""

    def mend(self) -> None:
        """Mend the link: connections can be made again."""


class NamespaceLink:
    """Two network namespaces and a veth pair. Both are deleted at the end."""

    name = "namespaces"
    is_insecure = True

    def __init__(self) -> None:
        self._tag = secrets.token_hex(3)
        self._net = f"10.213.{secrets.randbelow(256)}"
        self._made: list[str] = []
        self.uris: dict[str, str] = {}
        self.host_ids: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            for host in "ab":
                self._ip("netns", "add", self._space(host))
                self._made.append(self._space(host))
            self._ip(
                *("link", "add", self._device("a"), "netns", self._space("a"), "type", "veth"),
                *("peer", "name", self._device("b"), "netns", self._space("b")),
            )
            for host in "ab":
                inside = ("-n", self._space(host))
                self._ip(*inside, "addr", "add", f"{self.address(host)}/30", "dev", self._device(host))
                self._ip(*inside, "link", "set", "lo", "up")
                self._ip(*inside, "link", "set", self._device(host), "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        while self._made:
            self._ip("netns", "delete", self._made.pop())  # and with it its end of the pair, and so the other

    def address(self, host: str) -> str:
        """Return the address of the host's end of the pair of virtual network devices."""
        return f"{self._net}.{1 if host == 'a' else 2}"

    def prefix(self, host: str) -> list[str]:
        """Return the words that run a command in the host's namespace."""
        return ["ip", "netns", "exec", self._space(host)]

    def uri_of_a_for_b(self) -> str:
        """Return the address of a's node, which is the same for every client."""
        return self.uris["a"]

    def sent_bytes(self) -> int:
        """Return the transmit counter of host a's interface, in bytes."""
        found: list[dict[str, Any]] = json.loads(
            self._ip("-n", self._space("a"), "-s", "-j", "link", "show", self._device("a"))
        )
        return int(found[0]["stats64"]["tx"]["bytes"])

    def cut(self) -> None:
        """Take the interface down."""
        self._ip("-n", self._space("a"), "link", "set", self._device("a"), "down")

    def mend(self) -> None:
        """Bring the interface up again."""
        self._ip("-n", self._space("a"), "link", "set", self._device("a"), "up")

    def _space(self, host: str) -> str:
        return f"dp{self._tag}-{host}"

    def _device(self, host: str) -> str:
        return f"dp{self._tag}{host}"

    def _ip(self, *args: str) -> str:
        return subprocess.run(["ip", *args], check=True, stdout=subprocess.PIPE, text=True).stdout


class LoopbackLink:
    """Both hosts are this machine, with a proxy between them."""

    name = "loopback"
    is_insecure = False

    def __init__(self) -> None:
        self._proxy: Proxy | None = None
        self.uris: dict[str, str] = {}
        self.host_ids: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._proxy is not None:
            self._proxy.__exit__()

    def address(self, host: str) -> str:
        """Return the loopback address."""
        return "127.0.0.1"

    def prefix(self, host: str) -> list[str]:
        """Return no words, because commands run on this machine."""
        return []

    def uri_of_a_for_b(self) -> str:
        """Return the address of the proxy."""
        self._proxy = Proxy(self.uris["a"])
        return self._proxy.uri

    def sent_bytes(self) -> int:
        """Return the bytes that the proxy's connections to host a received, by TCP_INFO."""
        return self._proxy.received_bytes() if self._proxy else 0

    def cut(self) -> None:
        """Break every connection, and accept no new ones."""
        assert self._proxy is not None
        self._proxy.is_refusing = True
        self._proxy.cut()

    def mend(self) -> None:
        """Accept connections again."""
        assert self._proxy is not None
        self._proxy.is_refusing = False
