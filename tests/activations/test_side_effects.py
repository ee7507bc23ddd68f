"""What a block changes beside its outputs is changed once, though it is computed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.activations.automatic import Seen, choose_policy
from tests.harness import run_ranks


class Telling(nn.Module):
    """Adds to a list it is given, as mixtures of experts do with their losses, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        hidden = torch.relu(self.linear(self.norm(x)))
        losses.append(hidden.mean())
        return x + hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.blocks = nn.Linear(8, 8), nn.ModuleList(Telling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, losses)
        assert len(losses) == 3
        return x.square().mean() + sum(losses)


def trained(policy: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = onefold.shard(Net(), stage=2, activations=policy)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, onefold.full_state_dict(model)


@pytest.mark.parametrize("policy", ["checkpoint", "checkpoint+host"])
def test_lists_and_statistics_are_as_if_all_were_kept(policy):
    kept, again = run_ranks(2, trained, "keep")[0], run_ranks(2, trained, policy)[0]
    assert again[0] == kept[0]
    assert int(kept[1]["blocks.0.norm.num_batches_tracked"]) == 3
    assert all(torch.equal(again[1][name], value) for name, value in kept[1].items())


def test_auto_counts_the_blocks_that_keep_theirs_in_any_case():
    seen = Seen(kept=10, inputs=1, room=50)
    assert choose_policy(seen, blocks=1, tp=1)[0] == "keep"
    assert choose_policy(seen, blocks=1, tp=1, others=3)[0] != "keep" or 4 * 10 <= 0.8 * 50
    assert choose_policy(Seen(kept=10, inputs=1, room=45), blocks=1, tp=1, others=3)[0] == "checkpoint+host"
