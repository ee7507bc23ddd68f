"""Who can reach a run: its listening sockets from the kernel's table, and what another user of the machine gets.

A run that is started with ENTER has a network namespace whose host name resolves to an address that is not loopback, as
on most clusters: there gloo and torch's store listen on it unless told otherwise.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.patience import PATIENCE_S
from tests.train.launched import Launch

CAN_ENTER = os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "nsenter")))
ADDRESS = "10.77.0.1"
ENTER = (
    "exec unshare --net --uts sh -c 'ip link set lo up && ip link add one type veth peer name two && "
    f"ip addr add {ADDRESS}/24 dev one && ip link set one up && ip link set two up && "
    f'echo {ADDRESS} > /proc/sys/kernel/hostname && exec "$@"\' sh "$@"'
)
NOBODY = 65534
EVIL = b"\x80\x04\x95cos\nsystem\n(S'touch %s'\ntR."  # a pickle that runs a command


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address in hexadecimal digits, and port, of all sockets that listen in the namespace of a process."""
    found = set()
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A":
                address, _, port = words[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


def outside_loopback(found: set[tuple[str, int]]) -> set[tuple[str, int]]:
    ipv6 = "00000000000000000000000001000000"
    return {one for one in found if not (len(one[0]) == 8 and one[0].endswith("7F")) and one[0] != ipv6}


def as_nobody(pid: int, code: str, *arguments: str) -> str:
    """Run Python as another user inside the namespace of a process; what it printed."""
    become = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", sys.executable, "-I", "-c", f"{become}\n{code}", *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ATTACK = """
evil, *pids = sys.argv[1].encode("latin1"), *sys.argv[2:]
reached = 0
for name in ("tcp", "tcp6"):
    for row in open(f"/proc/self/net/{name}").read().splitlines()[1:]:
        words = row.split()
        if words[3] == "0A":
            for _ in range(3):
                with socket.socket() as s:
                    s.settimeout(5)
                    try:
                        s.connect(("127.0.0.1", int(words[1].rpartition(":")[2], 16)))
                        s.sendall(evil * 3)
                        reached += 1
                    except OSError:
                        pass
opened = []
for pid in pids:
    for path in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/fd"):
        try:
            os.listdir(path) if path.endswith("fd") else open(path, "rb").read(1)
            opened.append(path)
        except OSError:
            pass
    for fd in range(3, 30):
        for mode in ("rb", "r+b"):
            try:
                open(f"/proc/{pid}/fd/{fd}", mode).close()
                opened.append(f"/proc/{pid}/fd/{fd}")
            except OSError:
                pass
print(reached, opened)
"""


def attack(launch: Launch, tmp_path: Path) -> int:
    """As another user: say evil things to every port, and open what processes have open; how many ports answered."""
    evil = (EVIL % str(tmp_path / "ran").encode()).decode("latin1")
    reached, _, opened = as_nobody(
        launch.process.pid, ATTACK, evil, *map(str, [launch.process.pid, *launch.rank_pids().values()])
    ).partition(" ")
    assert opened.strip() == "[]", "another user opened what a rank has open"
    assert not (tmp_path / "ran").exists()
    return int(reached)


def listeners_of_all_its_life(launch: Launch) -> set[tuple[str, int]]:
    """All that listened in the namespace of a launch, until its end."""
    seen: set[tuple[str, int]] = set()
    while launch.process.poll() is None:
        try:
            if os.readlink(f"/proc/{launch.process.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                seen |= listeners(launch.process.pid)
        except OSError:
            break  # it ended just now
        time.sleep(0.01)
    return seen
