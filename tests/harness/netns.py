"""A network of one's own: run a command where the only traffic on `lo` is what the command itself sends.

The kernel gives a process a fresh network namespace, whose loopback counters start at zero; its children share it.
Run as a script, this file enters a namespace and becomes the command behind it: no `ip`, no `unshare` needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
IFREQ = "16sH14x"  # struct ifreq: name, flags, the rest of the union
REFUSED = 97  # exit status: the kernel allows no namespace


def in_namespace(command: Sequence[str], *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command in a network namespace of its own, with `lo` up and nothing else."""
    full = [sys.executable, str(Path(__file__).resolve()), *command]
    return subprocess.run(full, capture_output=True, text=True, timeout=timeout_s)


def can_make_namespace() -> bool:
    return sys.platform == "linux" and in_namespace(["true"]).returncode == 0


def loopback_bytes() -> int:
    """All that was ever sent over `lo` in this namespace, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])  # eight of what was received come first
    raise AssertionError("this namespace has no lo")


def enter_namespace() -> None:
    """Root may; others may where the kernel lets them make a user namespace too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        found = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack(IFREQ, b"lo", 0))
        name, flags = struct.unpack(IFREQ, found)
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack(IFREQ, name, flags | IFF_UP))


if __name__ == "__main__":
    try:
        enter_namespace()
    except (OSError, AttributeError) as error:
        print(f"no network namespace: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    os.execvp(sys.argv[1], sys.argv[1:])
