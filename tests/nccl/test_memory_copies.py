"""Copies in memory from a GPU: taken beside steps, found after a rank was killed, restored to the bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold import CommError
from tests.checkpoint.runs import Case, Trainer, bits
from tests.checkpoint.test_lost_ranks import LostError, Start, go_on, memory_in, train_until_lost
from tests.faults.test_watcher import end_as_a_script
from tests.harness import device, start_ranks
from tests.nccl.ranks import FRESH, MARKS, ON_CPU, be_a_host, run_nccl

pytestmark = MARKS
HOST = onefold.Offload(optimizer="host")
KINDS = {
    "fp32": (Case(1, "fp32"), {}),
    "split": (Case(3, "split"), {}),
    "split-8bit": (Case(2, "split", "adamw-8bit"), {}),
    "bf16-offloaded": (Case(3, "bf16"), {"offload": HOST}),
}
WIDTH, LAYERS = (512, 3) if ON_CPU else (4096, 4)  # on a GPU a copy of 800 MB
COPIED, LAST = 4, 7


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_copied_is_restored_by_two_and_by_four_as_from_a_disk(kind: str, tmp_path: Path) -> None:
    case, fields = KINDS[kind]
    a, b, c, d = (tmp_path / name for name in "abcd")
    run_nccl(2, train_until_lost, case, tmp_path, [a, b], 2, {4: "at4"}, **fields)
    found = run_nccl(2, go_on, case, tmp_path, [Start([a, b], "at4"), Start([b, c], "at4")], **fields)
    assert found == [[("memory", 4, True)] * 2] * 2
    found = run_nccl(4, go_on, case, tmp_path, [Start([c, a, d, b], "at4")], **fields)
    assert found == [[("memory", 4, True)]] * 4


class Wide:
    """A model whose copy takes longer than its step, where one rank has no peers to exchange with."""

    def __init__(self, seed: int, stage: int, precision: Any) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.model = onefold.shard(layers.to(device()), stage=stage, precision=precision, units=(nn.Linear,))
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, lr=1e-1)
        self.input = torch.ones(2, WIDTH, device=device())

    def step(self) -> None:
        self.optimizer.backward(self.model(self.input).float().square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of this rank's masters and optimizer state."""
        sha = hashlib.sha256()
        for row in self.optimizer.state_dict()["slices"]:
            for key, value in sorted(row["state"].items()):
                sha.update(key.encode() + bits(torch.as_tensor(value)))
        for name, value in onefold.full_state_dict(self.model).items():  # on rank 0 all, on others none
            sha.update(name.encode() + bits(value))
        return sha.hexdigest()


def step_on(stage: int, precision: Any, disk: Path) -> tuple[Any, str, list[str]]:
    """Steps follow the copy of one at once. Returns what is restored, from where, and the digests of that state, of the
    state that was saved on disk after the step that was copied, and of the last step."""
    onefold.init()
    with memory_in(disk / "node"):
        with suppress(LostError):
            first = Wide(0, stage, precision)
            with onefold.resilient(disk / "run", first.model, first.optimizer, every=COPIED) as run:
                for step in range(1, LAST + 1):
                    first.step()
                    if step == COPIED:
                        onefold.save(disk / "saved", first.model, first.optimizer, step=step)
                    run.step(step, step=step)
                last = first.digest()
                raise LostError
        second, third = Wide(1, stage, precision), Wide(2, stage, precision)
        onefold.load(disk / "saved", third.model, third.optimizer)
        with onefold.resilient(disk / "run", second.model, second.optimizer) as run:
            return run.extra, run.restored or "", [second.digest(), third.digest(), last]


@pytest.mark.parametrize(("stage", "precision"), [(3, onefold.Precision(compute="bf16", master="split")), (2, "fp32")])
def test_a_copy_is_of_its_step_though_the_next_steps_follow_at_once(stage: int, precision: Any, tmp_path: Path) -> None:
    [(extra, restored, digests)] = run_nccl(1, step_on, stage, precision, tmp_path, timeout_s=180)
    found, wanted, last = digests
    assert (extra, restored) == (COPIED, "memory")
    assert found == wanted != last


def train_until_killed(case: Case, disk: Path, nodes: list[Path]) -> None:
    """Rank 1 is killed one step after step 4, whose copy is complete on all nodes by then."""
    be_a_host()
    onefold.init(timeout_s=60)
    rank = dist.get_rank()
    with memory_in(nodes[rank]):
        trainer = Trainer(case)
        try:
            with onefold.resilient(disk / "run", trainer.model, trainer.optimizer, every=2) as run:
                while True:
                    trainer.train(1)
                    run.step(trainer.extra, step=trainer.tried)
                    if trainer.tried == 4:
                        trainer.save(disk / "at4")
                        while not all(list(node.glob("*/step-00000004-*")) for node in nodes):
                            time.sleep(0.01)
                    if trainer.tried == 5 and rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
        except CommError as error:
            end_as_a_script(error, 1)


def go_on_afresh(*args: Any) -> Any:
    be_a_host()
    return go_on(*args)


def test_after_a_rank_was_killed_the_others_go_on_from_memory_with_the_bits_of_a_run_from_disk(tmp_path: Path) -> None:
    case, nodes = Case(3, "split"), [tmp_path / name for name in "abc"]
    with start_ranks(3, train_until_killed, case, tmp_path, nodes, env=FRESH, init=False) as group:
        assert [outcome.exitcode for outcome in group.join()] == [1, -signal.SIGKILL, 1]
    shutil.rmtree(nodes[1])
    start = Start([nodes[0], nodes[2]], "at4")
    with start_ranks(2, go_on_afresh, case, tmp_path, [start], env=FRESH, init=False) as group:
        outcomes = group.join()
    assert [outcome.value for outcome in outcomes] == [[("memory", 4, True)]] * 2, [one.error for one in outcomes]
