"""NUMA placement of the arena: the operating system is told a policy before the pages are touched."""

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from dataplane.core.errors import BadRequestError

_MBIND = {"x86_64": 237, "aarch64": 235}
_MODES = {"bind": 2, "interleave": 3}  # MPOL_BIND, MPOL_INTERLEAVE
_MAX_NODES = 1024
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class NumaPolicy:
    """A memory policy: `interleave` spreads pages over all NUMA nodes, `bind` puts them on one node."""

    mode: str
    nodes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "NumaPolicy":
        """Return the policy of a text `interleave` or `bind:N`. ValueError says what was found and wanted."""
        present = numa_nodes()
        if text == "interleave":
            return cls("interleave", present)
        match = re.fullmatch(r"bind:([0-9]{1,4})", text)
        if match is None or int(match[1]) not in present:
            there = ", ".join(map(str, present))
            raise ValueError(f"numa is {text!r}; wanted interleave or bind:N, with N one of {there} on this machine")
        return cls("bind", (int(match[1]),))

    def apply(self, address: int, nbytes: int) -> None:
        """Set the policy for a mapping whose pages are not touched yet. BadRequestError if the system refuses."""
        number = _MBIND.get(platform.machine())
        if number is None:
            raise BadRequestError(f"--numa works on {' and '.join(_MBIND)}, this machine is {platform.machine()}")
        words = (ctypes.c_ulong * (_MAX_NODES // 64))()
        for node in self.nodes:
            words[node // 64] |= 1 << node % 64
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MODES[self.mode]))
        if libc.syscall(ctypes.c_long(number), *arguments, words, ctypes.c_ulong(_MAX_NODES), ctypes.c_uint(0)):
            reason = os.strerror(ctypes.get_errno())
            raise BadRequestError(
                f"the kernel refuses to place memory by {self.mode} on NUMA node(s) {list(self.nodes)} ({reason}); "
                "containers need CAP_SYS_NICE or a seccomp profile that allows mbind: leave --numa away"
            )

    def __str__(self) -> str:
        return "interleave" if self.mode == "interleave" else f"bind:{self.nodes[0]}"


def numa_nodes() -> tuple[int, ...]:
    """Return the NUMA nodes of this machine; (0,) where the system names none."""
    found = sorted(int(path.name[4:]) for path in _NODES.glob("node[0-9]*"))
    return tuple(found) or (0,)
