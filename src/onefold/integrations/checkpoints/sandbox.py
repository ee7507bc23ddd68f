"""What the process that reads pickle gives up before it reads: network, other programs, writing, signals, memory.

The unpickler that runs there builds tensors and inert objects only. This is the second wall: even code that a file
managed to run could open no socket, start no program, create or change no file and signal no process. Output goes to
files that the parent had opened.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterator
from typing import NamedTuple

NOBODY = 65534
ROOM_BYTES = 4 << 30  # beside the files: torch's own memory, and what encoding takes
CPU_S = 120
BYTES_PER_CPU_S = 10_000_000  # slower than any machine reads, hashes and writes

PR_SET_NO_NEW_PRIVS, SECCOMP_FILTER, ALL_THREADS = 38, 1, 1
ALLOW, DENY = 0x7FFF0000, 0x00050001  # DENY: the call returns EPERM
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32 = 0x40000000  # numbers of x86-64's second table of calls begin here
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # in the kernel's struct seccomp_data


class Machine(NamedTuple):
    """Numbers of system calls on one kind of machine."""

    arch: int
    seccomp: int
    opening: dict[int, int]  # calls that open files -> the position of their flags
    denied: tuple[int, ...]


# Sockets; execve; ptrace and its kin; signals; names and modes of files; namespaces, mounts, bpf, io_uring.
BOTH = (424, 425, 434, 437, 452)
MACHINES = {
    "x86_64": Machine(
        0xC000003E, 317, {2: 1, 257: 2},
        (41, 42, 43, 44, 46, 49, 50, 53, 288, 59, 322, 101, 310, 311, 62, 200, 234, 76, 82, 83, 84, 85, 86, 87, 88, 90,
         92, 94, 133, 258, 259, 260, 263, 264, 265, 266, 268, 316, 165, 272, 308, 321, *BOTH),
    ),
    "aarch64": Machine(
        0xC00000B7, 277, {56: 2},
        (198, 199, 200, 201, 202, 203, 206, 211, 242, 221, 281, 117, 270, 271, 129, 130, 131, 33, 34, 35, 36, 37, 38,
         45, 53, 54, 276, 40, 97, 268, 280, *BOTH),
    ),
}  # fmt: skip


def enter(source_bytes: int) -> list[str]:
    """Gives up all that reading `source_bytes` of files does not need. The measures that this system allowed."""
    _limit(source_bytes)
    return [
        name for name, taken in (("limits", True), ("user", _drop_user()), ("system calls", _filter_calls())) if taken
    ]


def _limit(source_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, used + 2 * source_bytes + ROOM_BYTES),
        (resource.RLIMIT_FSIZE, 2 * source_bytes + ROOM_BYTES),
        (resource.RLIMIT_CPU, CPU_S + source_bytes // BYTES_PER_CPU_S),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _drop_user() -> bool:
    """Root becomes nobody; any other user stays."""
    if os.geteuid() != 0:
        return False
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # a container without these rights
        return False
    return True


def _filter_calls() -> bool:
    """Makes system calls fail that are not needed, in all threads of this process and for good."""
    machine = MACHINES.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    if machine is None or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    rules = list(_rules(machine))
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    return libc.syscall(machine.seccomp, SECCOMP_FILTER, ALL_THREADS, program) == 0


def _rules(machine: Machine) -> Iterator[bytes]:
    """A BPF program: its last rule denies, the one before it allows."""
    steps: list[tuple[int, int, bool | None]] = [  # code, operand, and what to do if the comparison holds, or not
        (LOAD, ARCH_AT, None),
        (EQUAL, machine.arch, False),
        (LOAD, NUMBER_AT, None),
        (AT_LEAST, X32, True),
        *((EQUAL, number, True) for number in machine.denied),
    ]
    for number, position in machine.opening.items():  # the flags are looked at, then the number is loaded again
        steps += [(EQUAL, number, None), (LOAD, ARGUMENTS_AT + 8 * position, None), (ANY_BIT, WRITING, True)]
        steps += [(LOAD, NUMBER_AT, None)]
    last = len(steps) + 1
    for at, (code, operand, denies) in enumerate(steps):
        to_end = last - at - 1
        if code == EQUAL and denies is None:
            yield struct.pack("@HBBI", code, 0, 3, operand)  # another call: past its three rules
        else:
            holds, fails = (to_end if denies is True else 0), (to_end if denies is False else 0)
            yield struct.pack("@HBBI", code, holds, fails, operand)
    yield struct.pack("@HBBI", RETURN, 0, 0, ALLOW)
    yield struct.pack("@HBBI", RETURN, 0, 0, DENY)
