"""Takes away from a process what no parser needs: sockets, other programs, and the memory of other processes
(`dataplane.core.seccomp`).

The table lists what is refused. Files may still be opened, because Python's modules and time zones are read when they
are first needed.
"""

from dataplane.core.seccomp import ALLOW, AT_LEAST, EQUAL, REFUSE, Numbers, end, if_number, install, number_of

REFUSED: Numbers = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "io_uring_setup": (425, 425),  # it makes sockets without the calls above
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kill": (62, 129),
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
}
"""The number of each refused call, on x86_64 and on aarch64."""
_OTHER_NUMBERS = 0x40000000
"""The first number of x86_64's second table of calls."""


def take_network_away() -> None:
    """Refuse the calls of the table from now on. Raises OSError if the system has no filters."""
    steps = if_number(AT_LEAST, _OTHER_NUMBERS, [end(REFUSE)])
    for call in REFUSED.values():
        steps += if_number(EQUAL, number_of(call), [end(REFUSE)])
    install(steps, otherwise=ALLOW)
