"""Filters of calls of the system (seccomp): which calls a process may still make. x86_64 and aarch64 only.

A filter holds for all threads of the process, and cannot be removed. It is made of steps of 8 bytes each; its form is
in the kernel's Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping, Sequence

Numbers = Mapping[str, tuple[int, int]]
"""The number of each call by its name, on x86_64 and on aarch64."""

CLONE_THREAD, PROT_EXEC = 0x10000, 4
EQUAL, AT_LEAST, HAS_BITS = 0x15, 0x35, 0x45
"""Tests of a number: it is another one, is not below it, has one of its bits."""
ALLOW, REFUSE, LIKE_AN_OLD_KERNEL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
"""What happens to a call: it is made, fails with EPERM, or fails as if the kernel did not have it."""

_KILL_PROCESS = 0x80000000
_MACHINES: Mapping[str, tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of a machine in `Numbers`, and its AUDIT_ARCH."""
_SECCOMP: Mapping[str, int] = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_LOAD, _RETURN = 0x20, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_libc = ctypes.CDLL(None, use_errno=True)


def why_unavailable() -> str:
    """Return the reason why this system has no filters for calls, or an empty string if it has them. Changes
    nothing."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES or sys.maxsize < 1 << 32:
        return (
            f"there is no table of calls for {sys.platform} on {machine}, only for 64-bit Linux on x86_64 and aarch64"
        )
    # a kernel that has filters reads this one, which is nowhere
    _seccomp(0, None)
    code = ctypes.get_errno()
    return "" if code == errno.EFAULT else f"this kernel or container has no seccomp filters ({os.strerror(code)})"


def install(steps: Sequence[bytes], *, otherwise: int) -> None:
    """Filter the calls of this process from now on, in all of its threads. `otherwise`: what happens to a call of which
    the steps say nothing. Raises OSError if the system has no filters, or refuses."""
    if why := why_unavailable():
        raise OSError(errno.ENOSYS, why)
    _, arch = _MACHINES[platform.machine()]
    begin = [_load(_ARCH_AT), _jump(EQUAL, arch, skip_if_not=0, skip_if=1), end(_KILL_PROCESS), _load(_NUMBER_AT)]
    program = b"".join([*begin, *steps, end(otherwise)])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "the system refuses PR_SET_NO_NEW_PRIVS")
    failed = _seccomp(_FLAG_TSYNC, header)
    if failed:
        raise OSError(ctypes.get_errno() or errno.EBUSY, f"the system refuses a seccomp filter (thread {failed})")


def number_of(call: tuple[int, int]) -> int:
    """Return the number of a call on this machine. Raises KeyError if there is no table for it."""
    column, _ = _MACHINES[platform.machine()]
    return call[column]


def if_number(test: int, value: int, then: Sequence[bytes]) -> list[bytes]:
    """Return steps that are done if the number of the call passes a test."""
    return [_jump(test, value, skip_if_not=len(then)), *then]


def if_argument(place: int, test: int, value: int, *, then: int, otherwise: int) -> list[bytes]:
    """Return steps that decide by the lower half of an argument. Kernels read no more of those that are looked at."""
    return [_load(_ARGUMENTS_AT + 8 * place), _jump(test, value, skip_if_not=1), end(then), end(otherwise)]


def end(action: int) -> bytes:
    """Return the step that decides."""
    return struct.pack("=HBBI", _RETURN, 0, 0, action)


def _seccomp(flags: int, program: bytes | None) -> int:
    """Give the kernel a filter. Return 0, -1 with an errno, or the number of a thread that cannot have it."""
    number = ctypes.c_long(_SECCOMP[platform.machine()])
    return int(_libc.syscall(number, ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(flags), program))


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _jump(test: int, value: int, *, skip_if_not: int, skip_if: int = 0) -> bytes:
    return struct.pack("=HBBI", test, skip_if, skip_if_not, value)
