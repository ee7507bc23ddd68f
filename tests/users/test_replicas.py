"""State that ranks hold alike is compared by digests: one bit that differs names the rank and the parameter."""

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import ConfigError, MismatchError
from onefold.runtime.engine import engine_of
from tests.harness import device, run_ranks

ODD = 1  # the rank whose memory errs


def flip(tensor: torch.Tensor) -> None:
    """Changes the lowest bit of the first element."""
    bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    bits[0] ^= 1


def checked(model: nn.Module, optimizer: Any) -> str:
    try:
        onefold.check_replicas(model, optimizer)
    except MismatchError as error:
        return str(error)
    return ""


def corrupted(ranks: int, stage: int, precision: str, mesh: dict[str, int] | None) -> dict[str, str]:
    """What is said of a sound model, and then after each kind of corruption on one rank, which is mended again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device())
    model[0].bias.requires_grad_(False)
    places = onefold.mesh(**mesh) if mesh else None
    onefold.shard(model, stage=stage, precision=precision, mesh=places)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        model(torch.randn(2, 8, device=device())).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    model(torch.randn(2, 8, device=device())).square().mean().backward()  # as before a step
    said, odd = {"sound": checked(model, optimizer)}, torch.distributed.get_rank() == ODD
    if stage < 3:
        targets = {"frozen": model[0].bias.data, "parameter": model[2].weight.data}
    else:
        targets = {"parameter": engine_of(model).units[-1].flat_params.shards()[0]}
    if stage == 0 or mesh:
        targets["state"] = next(tensor for tensor in optimizer.state_tensors() if tensor.numel() > 1)
    for kind, tensor in targets.items():
        if odd:
            flip(tensor)
        said[kind] = checked(model, optimizer)
        if odd:
            flip(tensor)
    said["mended"] = checked(model, optimizer)
    optimizer.step()
    return said


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "mesh"),
    [(3, 0, "fp32", None), (3, 2, "bf16", None), (4, 3, "fp32", {"replica": 2, "shard": 2})],
)
def test_one_bit_that_differs_names_rank_and_parameter_on_every_rank(ranks, stage, precision, mesh):
    everyone = run_ranks(ranks, corrupted, ranks, stage, precision, mesh)
    assert all(said == everyone[0] for said in everyone), "ranks were told different things"
    said = everyone[0]
    assert said["sound"] == said["mended"] == ""
    wanted = {"frozen": "0.bias", "parameter": "2.weight", "state": "exp_avg of "}
    for kind in said.keys() - {"sound", "mended"}:
        assert wanted[kind] in said[kind], said
        if ranks == 3 or kind == "frozen":
            assert f"rank {ODD} holds other bits of " in said[kind] and " than ranks 0, 2" in said[kind]
        else:
            assert "rank 1 and rank 3" in said[kind] and "cannot be told" in said[kind]
    assert len(said) == {0: 5, 2: 4, 3: 4}[stage], "not all kinds were tried"


def foreign() -> str:
    model = onefold.shard(nn.Linear(2, 2), stage=1)
    with pytest.raises(ConfigError, match="SGD is no onefold"):
        onefold.check_replicas(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return "refused"


def test_an_optimizer_of_another_kind_is_refused():
    assert run_ranks(2, foreign) == ["refused"] * 2
