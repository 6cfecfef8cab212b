"""Takes away from a process what no parser needs: sockets, other programs, and the memory of other processes.

A seccomp filter refuses these calls of the system with EPERM, in all threads, for good. Files may still be opened,
because Python's modules and time zones are read when they are first needed. x86_64 and aarch64 only. The form of a
filter is in the kernel's Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping

REFUSED: Mapping[str, tuple[int, int]] = {
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
_MACHINES: Mapping[str, tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of a machine in the table above, and its AUDIT_ARCH."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_OTHER_NUMBERS = 0x40000000  # x86_64's second table of calls


def take_network_away() -> None:
    """Refuse the calls from now on. Raises OSError if this system has no such filters."""
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of calls for {platform.machine()}")
    program = _program(*_MACHINES[platform.machine()])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _program(column: int, arch: int) -> bytes:
    """Return the filter: 8 bytes for each instruction. A jump says how many to skip if its test holds, and if not."""
    program = [_step(_LOAD, 4), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    program += [_step(_AT_LEAST, _OTHER_NUMBERS, 0, 1), _step(_RETURN, _REFUSE)]
    for numbers in REFUSED.values():
        program += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _REFUSE)]
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, skip_if: int = 0, skip_if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_if_not, value)
