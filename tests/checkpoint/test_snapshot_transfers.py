"""A snapshot has the bits of the state, and takes a few transfers for each unit, not one for each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint.protocol.background import Worker
from onefold.checkpoint.protocol.snapshot import staged
from onefold.checkpoint.protocol.state import OwnedElements, rank_contents
from onefold.comm.streams import SideStream
from onefold.runtime.engine import engine_of
from tests.checkpoint.runs import Case, Trainer
from tests.harness.pool import run_ranks


class Counting(torch.overrides.TorchFunctionMode):
    """Counts copies into host memory."""

    copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is Tensor.copy_
        return func(*args, **(kwargs or {}))


def piece_by_piece(one: OwnedElements) -> Tensor:
    return torch.cat([one.read(span, torch.empty(span.numel, dtype=one.dtype)).clone() for span in one.spans()])


def snapshot(case: Case, fields: dict[str, Any]) -> int:
    """Of how many elements; their bits are compared."""
    onefold.init()
    trainer = Trainer(case, **fields).train(2)
    engine, optimizer = engine_of(trainer.model), trainer.optimizer
    engine.quiesce()
    with torch.no_grad():
        owned = rank_contents(engine, [optimizer]).owned
        wanted = [piece_by_piece(one) for one in owned]
        for beside in (None, SideStream(engine.device)):
            found = staged(owned, engine.device, Worker(), beside)
            assert [one.entry for one in found] == [one.entry for one in owned]
            for one, bits in zip(found, wanted, strict=True):
                assert one.read(one.elements, torch.empty(0)).view(torch.uint8).equal(bits.view(torch.uint8)), one.name
    engine.tiers.load_for_reading(None)
    return len(owned)


CASES = [
    (Case(3, "bf16"), {}), (Case(1, "fp32"), {}), (Case(2, "split"), {}), (Case(3, "split"), {}),
    (Case(2, "bf16", "lamb"), {}), (Case(3, "fp32", "shampoo"), {}), (Case(2, "bf16", "adamw-8bit"), {}),
    (Case(2, "bf16"), {"offload": "host"}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fields"), CASES, ids=str)
def test_a_snapshot_has_the_bits_of_what_is_read_piece_by_piece(case, fields):
    assert all(found > 10 for found in run_ranks(2, snapshot, case, fields))


def transfers() -> tuple[int, int, int]:
    onefold.init()
    model = onefold.shard(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))), stage=3, precision="bf16")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    model(torch.ones(2, 16)).float().sum().backward()
    optimizer.step()
    engine = engine_of(model)
    owned = rank_contents(engine, [optimizer]).owned
    with torch.no_grad(), Counting() as counting:
        staged(owned, engine.device, Worker(), SideStream(engine.device))
    return counting.copies, len(engine.units), len(owned)


def test_a_unit_takes_three_transfers_for_its_master_and_two_moments():
    ((copies, units, owned),) = run_ranks(1, transfers)
    assert owned == 12 * 2 * 3 and copies <= 3 * units < owned
