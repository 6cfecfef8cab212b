"""Which calls of the system a decode worker may still make when it decodes (`dataplane.core.seccomp`).

The table lists what is allowed: memory, threads, time, and reading and writing what is open already. Every other call
fails with EPERM: opening files, sockets, starting processes, signals to others, tracing, limits, namespaces, and calls
that future kernels bring.
"""

import os

from dataplane.core.seccomp import (
    ALLOW,
    CLONE_THREAD,
    EQUAL,
    HAS_BITS,
    LIKE_AN_OLD_KERNEL,
    PROT_EXEC,
    REFUSE,
    Numbers,
    end,
    if_argument,
    if_number,
    install,
    number_of,
)

ALLOWED: Numbers = {
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

CHECKED: Numbers = {
    "clone": (56, 220),  # threads only
    "clone3": (435, 435),  # fails with ENOSYS: its flags cannot be checked, and the C library then uses clone
    "tgkill": (234, 131),  # to this process only: abort() uses it
    "mmap": (9, 222),  # no memory that can be executed
    "mprotect": (10, 226),
}
"""The number of each call that is allowed with some arguments, as above."""


def give_up_calls() -> None:
    """Allow this process from now on the calls of the tables alone. Raises OSError if the system has no filters."""
    steps = [step for call in ALLOWED.values() for step in if_number(EQUAL, number_of(call), [end(ALLOW)])]
    of_checked = {
        "clone3": [end(LIKE_AN_OLD_KERNEL)],
        "clone": if_argument(0, HAS_BITS, CLONE_THREAD, then=ALLOW, otherwise=REFUSE),
        "tgkill": if_argument(0, EQUAL, os.getpid(), then=ALLOW, otherwise=REFUSE),
        "mmap": if_argument(2, HAS_BITS, PROT_EXEC, then=REFUSE, otherwise=ALLOW),
        "mprotect": if_argument(2, HAS_BITS, PROT_EXEC, then=REFUSE, otherwise=ALLOW),
    }
    for name, then in of_checked.items():
        steps += if_number(EQUAL, number_of(CHECKED[name]), then)
    install(steps, otherwise=REFUSE)
