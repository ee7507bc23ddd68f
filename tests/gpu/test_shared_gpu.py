"""Several ranks on one GPU over gloo: all stages end with the same bits there too, also in 16 bits and with tp.

Also runs as python -m tests.gpu.test_shared_gpu.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.cost.shapes import Shape
from tests.harness import run_ranks, shutdown_pools
from tests.models.trainer_gpt import initialised_gpt, next_tokens

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=4, hidden=128, heads=4, seq=64, vocab=256)


def trained(stage: int, precision: str, activations: str = "keep", tp: int = 1) -> tuple[list[float], dict]:
    torch.cuda.set_device(0)
    mesh = onefold.mesh(shard=-1, tp=tp, device="cuda")
    model = onefold.shard(
        initialised_gpt(SHAPE).cuda(),
        stage=stage,
        precision=precision,
        activations=activations,
        bucket_bytes=1 << 18,
        mesh=mesh,
    )
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    losses = []
    for step in range(4):
        seed = 100 * step + dist.get_rank() // tp
        tokens = torch.randint(0, SHAPE.vocab, (4, SHAPE.seq), generator=torch.Generator().manual_seed(seed)).cuda()
        loss = model(*next_tokens(tokens))
        optimizer.backward(loss)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, onefold.full_state_dict(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_stages_end_with_the_same_bits_on_a_shared_gpu(ranks: int, precision: str) -> None:
    first = run_ranks(ranks, trained, 0, precision, timeout_s=120)
    for stage in (1, 2, 3):
        for before, after in zip(first, run_ranks(ranks, trained, stage, precision, timeout_s=120), strict=True):
            assert after[0] == before[0]
            assert all(torch.equal(after[1][name], value) for name, value in before[1].items())


@pytest.mark.parametrize("policy", ["partition", "partition+host"])
def test_shared_block_inputs_change_no_bit_on_a_shared_gpu(policy: str) -> None:
    plain = run_ranks(2, trained, 3, "bf16", "checkpoint", 2, timeout_s=120)
    assert [rank[0] for rank in run_ranks(2, trained, 3, "bf16", policy, 2, timeout_s=120)] == [r[0] for r in plain]


if __name__ == "__main__":
    for ranks in (2, 4):
        for precision in ("fp32", "bf16"):
            test_all_stages_end_with_the_same_bits_on_a_shared_gpu(ranks, precision)
    for policy in ("partition", "partition+host"):
        test_shared_block_inputs_change_no_bit_on_a_shared_gpu(policy)
    shutdown_pools()
