"""A network of one's own: run a command where the only traffic on `lo` is what the command itself sends.

The kernel gives a process a fresh network namespace, whose loopback counters start at zero; its children share it.
Run as a script, this file enters a namespace and becomes the command behind it: no `ip`, no `unshare` needed.

`two_nodes` joins two of them by a slow wire, with `ip` and `tc`, as root. They have no names and live only as long as
the processes in them, so nothing is left behind, however a test ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
IFREQ = "16sH14x"  # struct ifreq: name, flags, the rest of the union
WIRE = "wire"
REFUSED = 97  # exit status: the kernel allows no namespace


def in_namespace(command: Sequence[str], *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command in a network namespace of its own, with `lo` up and nothing else."""
    full = [sys.executable, str(Path(__file__).resolve()), *command]
    return subprocess.run(full, capture_output=True, text=True, timeout=timeout_s)


def can_make_namespace() -> bool:
    return sys.platform == "linux" and in_namespace(["true"]).returncode == 0


class Sent(NamedTuple):
    """All that this namespace ever sent through one device; bytes include each packet's headers."""

    bytes: int
    packets: int


def sent(device: str) -> Sent:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return Sent(*map(int, counters.split()[8:10]))  # eight of what was received come first
    raise AssertionError(f"this namespace has no {device}")


def sent_again() -> int:
    """Segments that TCP has sent a second time in this namespace."""
    names, counts = (
        line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    return int(counts[names.index("RetransSegs")])


def loopback_bytes() -> int:
    return sent("lo").bytes


class Node:
    """A namespace kept by a shell, which ends when its input closes: at the latest with this process."""

    def __init__(self, shell: subprocess.Popen[str]) -> None:
        self._shell = shell
        self.pid = shell.pid

    def run(self, command: str) -> None:
        assert self._shell.stdin and self._shell.stdout and self._shell.stderr
        print(command, "&& echo done || exit", file=self._shell.stdin, flush=True)
        if self._shell.stdout.readline() != "done\n":
            raise OSError(f"{command}: {self._shell.stderr.read().strip()}")


@contextmanager
def two_nodes(mbit_per_s: int) -> Iterator[tuple[Node, Node]]:
    """Two namespaces joined by a veth pair, called WIRE at both ends, that carries so many Mbit/s each way.

    It loses nothing, and nothing is sent twice on suspicion: what its counters add up to was sent once.
    """

    def shell() -> subprocess.Popen[str]:
        pipe, this = subprocess.PIPE, str(Path(__file__).resolve())
        return subprocess.Popen([sys.executable, this, "sh"], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with shell() as first, shell() as second:  # leaving closes their input and waits for them
        nodes = Node(first), Node(second)
        nodes[1].run("true")  # once it answers it is in its namespace
        nodes[0].run(f"ip link add {WIRE} type veth peer name {WIRE} netns {nodes[1].pid}")
        for number, node in enumerate(nodes, start=1):
            node.run(f"ip link set {WIRE} addrgenmode none up")  # none: IPv6 would send greetings of its own
            node.run(f"ip address add 10.0.0.{number}/24 dev {WIRE}")
            node.run(f"tc qdisc add dev {WIRE} root tbf rate {mbit_per_s}mbit burst 32kb latency 1s")
            node.run(f"ip route change 10.0.0.0/24 dev {WIRE} rto_min 10s")  # a busy machine answers late
            node.run("echo 0 > /proc/sys/net/ipv4/tcp_early_retrans")
        yield nodes


def can_join_nodes() -> bool:
    try:
        with two_nodes(mbit_per_s=1):
            return True
    except OSError:
        return False


def move_to(pid: int) -> None:
    """Put this thread, and all it starts from now on, where another process is."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
