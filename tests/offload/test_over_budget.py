"""A model whose states are four times what the device may hold trains through the disk tier, within the budget."""

from __future__ import annotations

import torch
from torch import nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks

LAYERS, DIM, STEPS = 24, 128, 4


def trained(offload: onefold.Offload | None) -> tuple[list[float], dict, int, int]:
    """Losses, parameters, bytes of all states without offload, and the most that lay on the device at once."""
    onefold.init()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(LAYERS)))
    model = onefold.shard(layers, stage=3, precision="bf16", offload=offload, bucket_bytes=32 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, step_in_backward=True)
    losses = []
    with onefold.track_memory(model) as tracker:
        for _ in range(STEPS):
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            adam.step()
            losses.append(loss.item())
        engine_of(model).updates.wait()
    states = 16 * sum(unit.layout.used_numel for unit in engine_of(model).units) // torch.distributed.get_world_size()
    return losses, onefold.full_state_dict(model), states, tracker.peak_bytes


def compare(path: str) -> tuple[int, int, bool]:
    plain, whole, states, most = trained(None)
    moved, same, _, peak = trained(onefold.Offload(optimizer="disk", parameters="disk", path=path))
    assert most > states - states // 8, "without offload the states are on the device"
    assert plain == moved and plain[-1] < plain[0]
    return states, peak, all(torch.equal(whole[name], same[name]) for name in whole)


def test_a_model_of_four_times_the_budget_trains_through_the_disk(tmp_path) -> None:
    for states, peak, same in run_ranks(2, compare, str(tmp_path)):
        assert peak <= states // 4, f"{peak} bytes on the device, of {states} bytes of states"
        assert same
