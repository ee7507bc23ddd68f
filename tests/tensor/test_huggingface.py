"""A Hugging Face model split by its own tp_plan trains as the unsplit one does, at every stage to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.parity.stage3.test_huggingface import LLAMA, SMALL, VOCAB
from tests.parity.training import same_bits
from tests.tensor.runs import stream_of

plans = pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers applies no tp_plan")


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, **SMALL}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).train()


def speak(model: nn.Module, step: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + stream)
    drawn = torch.randint(3, VOCAB, (2, 9), generator=generator)
    return model(input_ids=drawn, labels=drawn).loss


def train(shard: int, stages: tuple[int, ...]) -> list[tuple[dict[str, Tensor], list[float]]]:
    mesh = onefold.mesh(shard=shard, tp=2)
    found = []
    for stage in stages:
        model = plans.apply_tensor_parallelism(llama(), mesh["tp"] if mesh.ndim > 1 else mesh)
        onefold.shard(model, stage=stage, mesh=mesh, bucket_bytes=8 << 10)
        optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
        losses = []
        for step in range(3):
            loss = speak(model, step, stream_of(mesh))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(speak(model, 9, 0).item())
        found.append((onefold.full_state_dict(model), losses))
    return found


def alone(streams: int) -> tuple[dict[str, Tensor], list[float]]:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for stream in range(streams):
            (speak(model, step, stream) / streams).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return {name: p.detach() for name, p in model.named_parameters()}, [speak(model, 9, 0).item()]


@pytest.mark.parametrize("shard", [1, 2])
def test_llama_by_its_tp_plan(shard: int) -> None:
    wanted, last = alone(shard)
    by_rank = run_ranks(2 * shard, train, shard, (0, 2, 3))
    first = by_rank[0][0][0]
    for name, value in wanted.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
    for rank in by_rank:
        assert all(losses[-1] == pytest.approx(last[0], rel=1e-5) for _, losses in rank)
        assert all(losses == rank[0][1] for _, losses in rank)
    assert all(same_bits(state[name], value) for state, _ in by_rank[0] for name, value in first.items())


# -- styles that do not work with ZeRO ---------------------------------------------------------------------------------


def packed(stage: int) -> None:
    import transformers

    settings: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, **SMALL, "pad_token_id": 0}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**settings))
    mesh = onefold.mesh(shard=1, tp=2)
    plans.apply_tensor_parallelism(model, mesh, tp_plan={"model.layers.*.mlp.gate_up_proj": "packed_colwise"})
    onefold.shard(model, stage=stage, mesh=mesh)


@pytest.mark.parametrize("stage", [0, 3])
def test_packed_projections_are_refused_by_name(stage: int) -> None:
    for caught in run_ranks_raises(2, packed, stage):
        assert caught.type_name.endswith("ModelError")
        assert "model.layers.0.mlp.gate_up_proj.weight is a DTensor with placement" in caught.message


def summed_later(stage: int) -> None:
    """Qwen3's own plan sums the gradient of `q_norm` over tp once autograd has left it in .grad."""
    import transformers

    settings: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8, **SMALL}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).train()
    mesh = onefold.mesh(shard=1, tp=2)
    plans.apply_tensor_parallelism(model, mesh)
    onefold.shard(model, stage=stage, mesh=mesh)
    speak(model, 0, 0).backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_summed_after_it_was_taken_fails_in_the_first_backward(stage: int) -> None:
    """Else each rank would train on its own part of it."""
    for caught in run_ranks_raises(2, summed_later, stage):
        assert "TypeError" in caught.type_name and "NoneType" in caught.message
