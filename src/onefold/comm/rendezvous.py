"""Rendezvous: the store through which ranks find each other, and the network interface on which they listen.

| ranks | store | interface of gloo and NCCL |
|---|---|---|
| started by Onefold's launcher | an unnamed file that other users cannot open | loopback |
| all on this node, by torchrun | torchrun's; if it runs none, rank 0 serves one on MASTER_ADDR alone | loopback |
| on several nodes | as above | gloo: the one that leads to MASTER_ADDR; NCCL: its own choice |
| one, by itself | in memory | loopback |

Neither the store nor gloo authenticates who connects, so the interface they listen on decides who can reach them. An
interface that the user has set (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) is kept.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from onefold.errors import CommError, ConfigError, ExposedWarning

STORE = "ONEFOLD_STORE"  # the path of the file that is the store of ranks started by Onefold's launcher
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
NCCL_LOOPBACK = f"={LOOPBACK}"  # exactly this name: without "=" NCCL matches prefixes
JOINED = "onefold/joined/{}"
SIOCGIFADDR = 0x8915
LISTENING = "0A"  # the state, in /proc/net/tcp
BACKLOG = 1024


class Place(NamedTuple):
    """This process's rank and the world size, from its environment."""

    rank: int
    world: int

    @classmethod
    def here(cls) -> Place | None:
        """None if the process was not started as a rank."""
        if STORE in os.environ:
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        found = [name for name in TORCHRUN_VARIABLES if name in os.environ]
        if "RANK" not in found and "WORLD_SIZE" not in found:
            return None
        if missing := [name for name in TORCHRUN_VARIABLES if name not in found]:
            raise ConfigError(
                f"the environment sets {', '.join(found)} but not {', '.join(missing)}; start with torchrun, or set all"
            )
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


_meetings = count()  # one for each process group that this process has made, as on its peers


def join(backend: str, timeout_s: float, device: torch.device | None = None) -> None:
    """Makes torch's default process group of all ranks, or of this process alone. Collective.

    `device` is this rank's GPU, on which NCCL then connects to its peers at once.
    """
    place, timeout = Place.here(), timedelta(seconds=timeout_s)
    _choose_interface(place)
    if place is None:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device
        )
        return
    store: dist.Store | None = None
    began_s = time.monotonic()
    try:
        # a prefix of its own: a second group would read the addresses of the first, and connect to nobody
        store = dist.PrefixStore(f"onefold{next(_meetings)}", _store(place, timeout))
        store.set(JOINED.format(place.rank), "")
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout, device_id=device
        )
    except RuntimeError as error:  # of torch: a time limit, a connection refused or broken
        raise CommError(
            f"rank {place.rank}: {_missing(store, place)} after {time.monotonic() - began_s:.0f} s (time limit "
            f"{timeout_s:g} s); look at that rank's output first. torch says: {str(error).splitlines()[0]}"
        ) from error
    _warn_if_exposed()


def _missing(store: dist.Store | None, place: Place) -> str:
    """Names the ranks that have not joined, for an error message."""
    try:
        absent = [rank for rank in range(place.world) if store and not store.check([JOINED.format(rank)])]
    except RuntimeError:
        store, absent = None, []  # the process that served the store has ended
    if store is None:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"the store at {where} did not answer"
    names = ", ".join(map(str, absent[:8])) + ", …" * (len(absent) > 8)
    return f"rank{'s' * (len(absent) > 1)} {names} did not join" if absent else "a rank joined and has ended, or hangs"


def _store(place: Place, timeout: timedelta) -> dist.Store:
    if path := os.environ.get(STORE):
        store: dist.Store = dist.FileStore(path, place.world)
        store.set_timeout(timeout)
        return store
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = _listener(place) if serves else None
    if listener is None:  # this rank is a client, or MASTER_ADDR is no address of this node that others can reach
        store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.world, timeout=timeout)))
        store.set_timeout(timeout)
        return store
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, place.world, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _listener(place: Place) -> socket.socket | None:
    """A socket that listens on MASTER_ADDR only; torch's own store would listen on all addresses of this node.

    None if MASTER_ADDR is not this node's, or is loopback while ranks are on other nodes: some systems give the first
    node MASTER_ADDR=localhost, and the others its name.
    """
    for family, _, _, _, target in _resolved(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])):
        loopback = ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback
        if loopback and not _on_this_node(place):
            continue
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(BACKLOG)
            return listener
        except OSError:
            listener.close()
    return None


def _resolved(address: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
    except OSError:
        return []


# -- interfaces ------------------------------------------------------------------------------------------------------


def _choose_interface(place: Place | None) -> None:
    """Sets the variables from which gloo and NCCL take their interface, unless the user has set them."""
    if place is None or _on_this_node(place):
        os.environ.setdefault(GLOO, LOOPBACK)
        os.environ.setdefault(NCCL, NCCL_LOOPBACK)
    elif GLOO not in os.environ and (found := _interface_to(os.environ["MASTER_ADDR"])):
        os.environ[GLOO] = found


def _on_this_node(place: Place) -> bool:
    """Whether all ranks are on this node."""
    return STORE in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(place.world)


def _interface_to(address: str) -> str | None:
    """The interface through which this node reaches an address; None if it is unknown, or is loopback.

    The first node may resolve its own name to loopback, where the others could not reach it.
    """
    for family, _, _, _, target in _resolved(address, 1):
        if family == socket.AF_INET:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
                try:
                    probe.connect(target)
                except OSError:
                    continue
                mine = probe.getsockname()[0]
            return next((name for name, owned in _addresses() if owned == mine and name != LOOPBACK), None)
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces of this node and their IPv4 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            yield name, socket.inet_ntoa(answer[20:24])


# -- torchrun's listening sockets ------------------------------------------------------------------------------------


class Listener(NamedTuple):
    """A listening TCP socket of this node, from the kernel's table."""

    address: str  # in hexadecimal digits; all zeros: every interface
    port: int
    inode: str

    @property
    def on_all_interfaces(self) -> bool:
        return not self.address.strip("0")


def _warn_if_exposed() -> None:
    """Warns, once per node, if a store that torchrun started listens on all interfaces of this node."""
    if STORE in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    agents = _sockets_of(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else set()
    ports = sorted(
        one.port
        for one in listening()
        if one.on_all_interfaces and (one.inode in agents or str(one.port) == os.environ["MASTER_PORT"])
    )
    if ports:
        warnings.warn(
            f"torchrun listens on every interface of this node (port {', '.join(map(str, ports))}) and lets in whoever "
            f"connects; with --standalone or --rdzv-backend c10d that is enough to run code as you. On one node start "
            f"the script with `onefold run`; on several, let only your nodes reach that port (docs/security.md)",
            ExposedWarning,
            stacklevel=4,
        )


def listening() -> Iterator[Listener]:
    """Every listening TCP socket of this network namespace."""
    for name in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/self/net", name).read_text().splitlines()[1:]
        except OSError:
            continue  # not Linux
        for words in map(str.split, rows):
            if words[3] == LISTENING:
                address, _, port = words[1].rpartition(":")
                yield Listener(address, int(port, 16), words[9])


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open; empty if this user may not read them."""
    found = set()
    with suppress(OSError):  # it has ended, or is another user's
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed just now
                target = os.readlink(path)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
