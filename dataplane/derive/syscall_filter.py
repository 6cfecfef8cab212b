"""A seccomp filter for decode workers: which calls of the system a process may still make when it decodes.

The table lists what is allowed: memory, threads, time, and reading and writing what is open already. Every other call
fails with EPERM: opening files, sockets, starting processes, signals to others, tracing, limits, namespaces, and calls
that future kernels bring. The filter holds for all threads and cannot be removed. x86_64 and aarch64 only.

The form of a filter is in the kernel's Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

_MACHINES: Mapping[str, tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of a machine in the tables below, and its AUDIT_ARCH."""

ALLOWED: Mapping[str, tuple[int, int]] = {
    # what is open already: the socket, the shard of this job, the log
    "read": (0, 63),
    "write": (1, 64),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "recvmsg": (47, 212),
    # memory
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    # threads
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # the process's own signals
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # time, random numbers, the size of the memory, the present folder (Pillow asks for it)
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "nanosleep": (35, 101),
    "getrandom": (318, 278),
    "sysinfo": (99, 179),
    "getcwd": (79, 17),
}
"""The number of each allowed call, on x86_64 and on aarch64."""

CHECKED: Mapping[str, tuple[int, int]] = {
    "clone": (56, 220),  # threads only
    "clone3": (435, 435),  # fails with ENOSYS: its flags cannot be checked, and the C library then uses clone
    "tgkill": (234, 131),  # to this process only: abort() uses it
    "mmap": (9, 222),  # no memory that can be executed
    "mprotect": (10, 226),
}
"""The number of each call that is allowed with some arguments, as above."""

_SECCOMP: Mapping[str, int] = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_THREAD, _PROT_EXEC = 0x10000, 4
_LOAD, _EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
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


def install() -> None:
    """Filter the calls of this process from now on, in all of its threads. Raises OSError if the system refuses."""
    program = _program(*_MACHINES[platform.machine()], os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "the system refuses PR_SET_NO_NEW_PRIVS")
    failed = _seccomp(_FLAG_TSYNC, header)
    if failed:
        raise OSError(ctypes.get_errno() or errno.EBUSY, f"the system refuses a seccomp filter (thread {failed})")


def _seccomp(flags: int, program: bytes | None) -> int:
    """Give the kernel a filter. Return 0, -1 with an errno, or the number of a thread that cannot have it."""
    number = ctypes.c_long(_SECCOMP[platform.machine()])
    return int(_libc.syscall(number, ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(flags), program))


def _program(column: int, arch: int, pid: int) -> bytes:
    """Return the filter in the kernel's form: 8 bytes for each instruction."""
    numbers = {name: number[column] for name, number in {**ALLOWED, **CHECKED}.items()}
    program = [_load(_ARCH_AT), _jump(_EQUAL, arch, skip_if_not=0, skip_if=1), _return(_KILL_PROCESS)]
    program.append(_load(_NUMBER_AT))
    for name in ALLOWED:
        program += _if_number(numbers[name], [_return(_ALLOW)])
    program += _if_number(numbers["clone3"], [_return(_ERRNO | errno.ENOSYS)])
    program += _if_number(numbers["clone"], _allow_if(0, _HAS_BITS, _CLONE_THREAD))
    program += _if_number(numbers["tgkill"], _allow_if(0, _EQUAL, pid))
    for name in ("mmap", "mprotect"):
        program += _if_number(numbers[name], _allow_unless(2, _HAS_BITS, _PROT_EXEC))
    return b"".join([*program, _return(_ERRNO | errno.EPERM)])


def _if_number(number: int, then: list[bytes]) -> list[bytes]:
    return [_jump(_EQUAL, number, skip_if_not=len(then)), *then]


def _allow_if(argument: int, test: int, value: int) -> list[bytes]:
    """Allow the call if the lower half of an argument passes a test. Kernels read no more of these arguments."""
    refused = _return(_ERRNO | errno.EPERM)
    return [_load(_ARGUMENTS_AT + 8 * argument), _jump(test, value, skip_if_not=1), _return(_ALLOW), refused]


def _allow_unless(argument: int, test: int, value: int) -> list[bytes]:
    refused = _return(_ERRNO | errno.EPERM)
    return [_load(_ARGUMENTS_AT + 8 * argument), _jump(test, value, skip_if_not=1), refused, _return(_ALLOW)]


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _jump(test: int, value: int, *, skip_if_not: int, skip_if: int = 0) -> bytes:
    return struct.pack("=HBBI", test, skip_if, skip_if_not, value)


def _return(action: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, action)
