"""What a local run can be reached by: read from the kernel's socket table, and tried as another user of the machine.

Each run has a network namespace whose host name resolves to an address that is not loopback, as on most clusters: there
gloo and torch's store listen on it unless told otherwise.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onefold.comm.rendezvous import Place, _listener
from tests.harness.patience import PATIENCE_S
from tests.train.launched import SMALL, Launch, launched

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="needs root, ip, unshare and nsenter",
)

ADDRESS = "10.77.0.1"
ENTER = (
    "exec unshare --net --uts sh -c 'ip link set lo up && ip link add one type veth peer name two && "
    f"ip addr add {ADDRESS}/24 dev one && ip link set one up && ip link set two up && "
    f'echo {ADDRESS} > /proc/sys/kernel/hostname && exec "$@"\' sh "$@"'
)
NOBODY = 65534
EVIL = b"\x80\x04\x95cos\nsystem\n(S'touch %s'\ntR."  # a pickle that runs a command

SCRIPT = """
import os, sys, time, torch, onefold
onefold.init(timeout_s=60)
model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
out = sys.argv[1]
for step in range(100000):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    if step == 2 and os.environ["RANK"] == "0":
        open(out + ".trains", "w").close()
    if os.path.exists(out + ".enough") and step > 3:
        sys.exit(0)
    onefold.full_state_dict(model)  # all ranks leave together, a step apart at most
"""


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


def test_a_local_training_is_reached_on_loopback_only_and_by_no_other_user_also_when_ranks_start_again(tmp_path):
    out = tmp_path / "deep" / "run"
    flags = ("--steps", "400", "--max-restarts", "1", "--save-every", "5", "--micro-batch", "1", "--ranks", "2")
    with launched(out, *SMALL, *flags, limit=ENTER) as launch:
        launch.wait_for(lambda: launch.steps() >= 6, "step 6")
        first = listeners(launch.process.pid)
        assert first and outside_loopback(first) == set()
        os.kill(launch.rank_pids()[1], signal.SIGKILL)
        launch.wait_for(lambda: listeners(launch.process.pid).isdisjoint(first) and launch.steps() >= 12, "the next")
        second = listeners(launch.process.pid)
        assert second and outside_loopback(second) == set()
        assert attack(launch, tmp_path) > 0
        launch.process.terminate()
        code, _, err = launch.end()
        assert launch.gone()
    assert code == 0 and "stopped and saved" in err, err


def test_verify_is_reached_on_loopback_only(tmp_path):
    seen: set[tuple[str, int]] = set()
    with launched(tmp_path / "deep", "--model", "gpt-tiny", "--ranks", "2", command="verify", limit=ENTER) as launch:
        while launch.process.poll() is None:
            try:
                if os.readlink(f"/proc/{launch.process.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                    seen |= listeners(launch.process.pid)
            except OSError:
                break  # it ended just now
            time.sleep(0.01)
        code, _, err = launch.end()
    assert code == 0, err
    assert seen and outside_loopback(seen) == set()


def script_file(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [str(path), str(tmp_path / "script")]


def test_a_script_under_onefold_run_is_reached_on_loopback_only_and_by_no_other_user(tmp_path):
    words = script_file(tmp_path)
    with launched(tmp_path / "deep", "--ranks", "2", *words, command="run", limit=ENTER) as launch:
        launch.wait_for(lambda: (tmp_path / "script.trains").exists(), "the third step")
        found = listeners(launch.process.pid)
        assert found and outside_loopback(found) == set()
        assert attack(launch, tmp_path) > 0
        (tmp_path / "script.enough").touch()
        code, _, err = launch.end()
        assert launch.gone()
    assert code == 0, err


def under_torchrun(tmp_path: Path, *flags: str, env: dict[str, str] | None = None) -> tuple[set, set, str]:
    """Where torchrun itself listens, where its ranks do, and what they say."""
    words = script_file(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", *flags, "--nproc-per-node", "2", *words]
    full = ["sh", "-c", ENTER, "sh", *command]
    with subprocess.Popen(full, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as torchrun:
        deadline_s = time.monotonic() + 180
        while not (tmp_path / "script.trains").exists():
            assert torchrun.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        own = inodes(torchrun.pid)
        rows = {}
        for name in ("tcp", "tcp6"):
            for row in Path(f"/proc/{torchrun.pid}/net/{name}").read_text().splitlines()[1:]:
                words = row.split()
                if words[3] == "0A":
                    address, _, port = words[1].rpartition(":")
                    rows[words[9]] = (address, int(port, 16))
        (tmp_path / "script.enough").touch()
        _, err = torchrun.communicate(timeout=180)
    assert torchrun.returncode == 0, err
    mine = {at for inode, at in rows.items() if inode in own}
    return mine, set(rows.values()) - mine, err


def inodes(pid: int) -> set[str]:
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_init_under_torchrun_listens_on_loopback_and_warns_once_that_torchrun_does_not(tmp_path):
    torchruns, ranks, err = under_torchrun(tmp_path, "--standalone")
    assert outside_loopback(torchruns), "torchrun listens on every interface: else there would be nothing to warn of"
    assert ranks and outside_loopback(ranks) == set()
    assert err.count("ExposedWarning: torchrun listens on every interface") == 1
    assert f"port {min(port for _, port in torchruns)}" in err


def test_a_store_that_rank_0_serves_listens_on_what_torchrun_chose(tmp_path):
    _, ranks, err = under_torchrun(tmp_path, "--standalone", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    chosen = "".join(f"{int(part):02X}" for part in reversed(ADDRESS.split(".")))
    assert {address for address, _ in outside_loopback(ranks)} == {chosen}
    assert err.count("ExposedWarning") == 1


@pytest.mark.parametrize("local", ["2", "1"])
def test_rank_0_listens_on_loopback_only_where_all_ranks_are_on_its_node(monkeypatch, local):
    """Some systems tell the first node MASTER_ADDR=localhost and the others its name."""
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, value)
    listener = _listener(Place(0, 2))
    assert (listener is not None) == (local == "2")
    if listener is not None:
        listener.close()
