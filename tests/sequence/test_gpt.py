"""The built-in GPT with cut sequences, and beside tensor parallelism, trains as in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import onefold
from onefold.train.run.model import GPT
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import run_ranks
from tests.tensor.runs import SHAPE, alone, tokens
from tests.tensor.test_parity import assert_near


def trained(axes: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = onefold.mesh(shard=1, **axes)
    torch.manual_seed(0)
    model = parallelize(GPT(SHAPE, mesh), mesh)
    onefold.shard(model, stage=3, mesh=mesh, bucket_bytes=8 << 10)
    optimizer, losses = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9), []
    for step in range(3):
        loss = model(*(model.stretch(one) for one in tokens(step, 0, 0)))
        optimizer.backward(loss)
        optimizer.clip_grad_norm(1.0)
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses, onefold.full_state_dict(model)


def ring() -> tuple[float, float, list[str]]:
    """With one head, so by the ring over balanced stretches: this rank's loss, that of one process, what differs."""
    mesh, shape = onefold.mesh(sequence=2), dataclasses.replace(SHAPE, heads=1)
    onefold.cut_sequence({"input_ids": tokens(0, 0, 0)[0]}, mesh)  # another model's batch, cut in another way
    torch.manual_seed(0)
    plain = GPT(shape)
    wanted = plain(*tokens(0, 0, 0))
    wanted.backward()
    torch.manual_seed(0)
    model = onefold.shard(GPT(shape, mesh), stage=3, mesh=mesh, bucket_bytes=8 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1.0)
    loss = model(*(model.stretch(one) for one in tokens(0, 0, 0)))
    loss.backward()
    optimizer.step()
    found = onefold.full_state_dict(model)
    steps = {name: value - value.grad for name, value in plain.named_parameters()} if found else {}
    wrong = [name for name, value in steps.items() if not torch.allclose(found[name], value, rtol=1e-4, atol=1e-6)]
    return loss.item(), wanted.item(), wrong if model.balanced else ["not balanced"]


def test_gpt_by_the_balanced_ring_trains_as_one_process_does() -> None:
    found = run_ranks(2, ring)
    assert [wrong for _, _, wrong in found] == [[], []]
    assert sum(loss for loss, _, _ in found) / 2 == pytest.approx(found[0][1], rel=1e-6)


@pytest.mark.parametrize("axes", [{"sequence": 2}, {"sequence": 2, "tp": 2}], ids=str)
def test_gpt_with_cut_sequences_trains_as_one_process_does_also_beside_tp(axes: dict[str, int]) -> None:
    wanted = alone(1)
    found = run_ranks(2 * axes.get("tp", 1), trained, axes)
    assert_near(found[0][1], wanted.params)
    means = [sum(losses) / len(found) for losses in zip(*(one[0] for one in found), strict=True)]
    assert means == pytest.approx(wanted.losses, rel=1e-5)
