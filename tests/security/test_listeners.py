"""What a local run can be reached by: read from the kernel's socket table, and tried as another user of the machine.

`onefold verify` and `onefold run` are asked the same in tests/planner/test_command_line.py and
tests/faults/test_run_command.py, which start them anyway.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onefold.comm.rendezvous import Place, _listener
from tests.security.reached import ADDRESS, CAN_ENTER, ENTER, attack, listeners, outside_loopback
from tests.train.launched import SMALL, launched

pytestmark = pytest.mark.skipif(not CAN_ENTER, reason="needs root, ip, unshare and nsenter")

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
    enough = torch.tensor(float(os.path.exists(out + ".enough")))
    torch.distributed.all_reduce(enough)  # what one rank has seen ends all of them in the same step
    if enough:
        break
"""


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


def script_file(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [str(path), str(tmp_path / "script")]


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


@pytest.mark.soak
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
