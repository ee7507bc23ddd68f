"""Over CUDA streams, state leaves the device for a copy in memory beside the next forward and backward, and the next
update waits for it. What is enqueued in which order is recorded on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.checkpoint.test_lost_ranks import LostError, memory_in
from tests.harness.pool import run_ranks
from tests.harness.recorded_streams import COMPUTE, Op, Recorder, recorded
from tests.parity.whole import LAMB

BF16 = onefold.Precision(compute="bf16", master="fp32")
CASES: dict[str, dict[str, Any]] = {
    "at step": {"stage": 2, "precision": BF16},
    "at step, sharded": {"stage": 3},
    "in backward": {"stage": 3, "in_backward": True},
    "whole tensors": {"stage": 2, "cls": LAMB},
    "whole tensors in backward": {"stage": 3, "cls": LAMB, "in_backward": True},
}


def marking(cls: type[torch.optim.Optimizer], recorder: Recorder) -> type[torch.optim.Optimizer]:
    """An optimizer that records when its updates are enqueued."""

    class Marking(cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            recorder.current.enqueue(Op("message", "update"))
            return super().step(closure)

    return Marking


def program(
    folder: Path, stage: int, cls: type[torch.optim.Optimizer] = torch.optim.Adagrad, in_backward: bool = False,
    precision: Any = "fp32",
) -> tuple[list[Op], list[Op], list[list[Op]]]:  # fmt: skip
    """What the step after a copy enqueues on the stream of compute, the end of the copy on its own, and what that
    step enqueues on each other stream."""
    onefold.init()
    with recorded() as recorder, memory_in(folder / "node"), suppress(LostError):
        model = onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=stage, precision=precision)
        optimizer = onefold.Optimizer(model, marking(cls, recorder), lr=1e-2, step_in_backward=in_backward)
        model.register_forward_hook(lambda *_: recorder.current.enqueue(Op("message", "forward")))

        def train() -> None:
            model(torch.ones(2, 8)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with onefold.resilient(folder / "run", model, optimizer, every=2) as run:
            train()
            train()
            before = {name: len(ops) for name, ops in recorder.program.items()}
            run.step()
            grown = [name for name, ops in recorder.program.items() if len(ops) > before.get(name, 0)]
            copied = [recorder.program[name][-1] for name in grown if name != COMPUTE]
            at = len(recorder.program[COMPUTE])
            lanes = {name: len(ops) for name, ops in recorder.program.items() if name != COMPUTE}
            train()
            after = recorder.program[COMPUTE][at:]
            beside = [recorder.program[name][start:] for name, start in lanes.items()]
            raise LostError
    return after, copied, beside


@pytest.mark.parametrize("case", CASES)
def test_the_next_update_waits_for_a_snapshot_and_nothing_before_it_does(case: str, tmp_path: Path) -> None:
    [(compute, copied, beside)] = run_ranks(1, program, tmp_path, **CASES[case])
    assert [op.kind for op in copied] == ["record"]
    waits = Op("wait", copied[0].what, copied[0].time)
    forward, update = Op("message", "forward"), Op("message", "update")
    updates = [place for place, op in enumerate(compute) if op == update]
    updates += [begins for ops in beside for begins in begun(ops, update, compute)]
    assert updates and compute.index(forward) < compute.index(waits) < min(updates), (compute, beside)


def begun(ops: list[Op], work: Op, compute: list[Op]) -> Iterator[int]:
    """For each time that another stream runs `work`: the place in the stream of compute after which it begins, which is
    where the event was recorded for which that stream waited last."""
    place = -1
    for op in ops:
        if op.kind == "wait" and (recorded_there := op._replace(kind="record")) in compute:
            place = compute.index(recorded_there)
        if op == work:
            yield place
