"""What a block changes beside its outputs is changed once, though it is computed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onefold
from onefold.cost.recomputed import Seen, choose_policy
from tests.harness import run_ranks
from tests.models import ReportingNet


def trained(policy: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = onefold.shard(ReportingNet(), stage=2, activations=policy)
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
