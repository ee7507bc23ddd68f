"""What a LoRA run holds: of the frozen base its parameters in bf16, at stage 3 sharded, and nothing else."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch

import onefold
from tests.harness import run_ranks

pytest.importorskip("peft")

from tests.peft.adapters import adapted, base, sharded, train

RANKS = 2


def live_bytes() -> int:
    """Bytes of all tensors of this process that are alive, each storage once."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            storage = one.untyped_storage()
            with suppress(RuntimeError):  # a tensor that torch left without memory has no address
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measured(stage: int) -> dict[str, Any]:
    numel = sum(p.numel() for p in base().parameters())
    before = live_bytes()
    model, optimizer = sharded(adapted(), stage, precision="bf16")
    train(model, optimizer, range(2))
    alive = live_bytes() - before
    report, placed = onefold.memory(model), onefold.placement(model)
    frozen = [row for row in placed.rows if row.optimizer == "frozen"]
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "numel": numel,
        "adapters": adapters,
        "alive": alive,
        "report": sum(getattr(report, part).measured for part in ("parameters", "gradients", "optimizer", "buffers")),
        "communication": report.communication.measured,
        "planned": [
            getattr(report, part).planned - getattr(report, part).measured
            for part in ("parameters", "gradients", "optimizer")
        ],
        "optimizer": report.optimizer.measured,
        "gradients": report.gradients.measured,
        "frozen": [(row.gradients, row.parameters) for row in frozen],
        "frozen elements": sum(row.elements for row in frozen),
        "parameters": report.parameters.measured,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_the_base_takes_its_bf16_parameters_and_nothing_else(stage: int) -> None:
    for found in run_ranks(RANKS, measured, stage):
        elements = (found["numel"] + found["adapters"]) / (RANKS if stage == 3 else 1)
        assert 2 * elements <= found["parameters"] <= 1.02 * 2 * elements  # padding, and a NaN for each parameter
        if stage == 3:  # below, frozen parameters stay in their own tensors, outside units
            assert found["frozen elements"] == found["numel"]
            assert set(found["frozen"]) == {("frozen", "sharded")}
        assert found["planned"] == [0, 0, 0]
        # what else there is belongs to adapters: fp32 master and moments, sharded, and bf16 gradients
        assert found["optimizer"] <= 1.1 * 12 * found["adapters"] / RANKS
        assert found["gradients"] <= 1.1 * 2 * found["adapters"] / RANKS
        # tensors that are alive in the process are those of the report, buffers of messages, and tables of the model
        assert found["alive"] <= found["report"] + found["communication"] + 16384
