"""tiled(): an MLP over tiles of tokens is the MLP, keeps nothing between its layers, and trains alike at all stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from tests.harness import run_ranks
from tests.models import DIM, MlpBlock, Speaking, Stack
from tests.parity.stage3.compare import Case, batch, between, train


def mlp(drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Dropout(drop), nn.Linear(64, 8))


def gradients(module: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor]:
    """Output, and the gradients of input and parameters."""
    torch.manual_seed(seed)
    given = x.detach().clone().requires_grad_()
    output = module(given)
    output.square().sum().backward()
    found = [output.detach(), given.grad, *(param.grad for param in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("shape", [(2, 50), (3, 5, 7), (9,)], ids=str)
def test_outputs_and_gradients_are_those_of_the_module_to_rounding(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, DIM)
    for drop in (0.0, 0.3):  # on a CPU tiles draw the same random numbers, one after the other
        whole, module = gradients(mlp(drop), x), mlp(drop)
        for tokens in (1, 16, 1000):
            again = gradients(onefold.tiled(module, tokens=tokens), x)
            torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a tensor of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.numel = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == self.width:
            self.numel = max(self.numel, result.numel())
        return result


def test_what_is_between_the_layers_exists_for_one_tile_at_a_time_and_is_not_kept() -> None:
    x, module, kept = torch.randn(4, 40, DIM), onefold.tiled(mlp(0.1), tokens=10), []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one.untyped_storage().data_ptr()) or one, lambda one: one
    )
    with Largest(64) as between:
        with keep:
            output = module(x.requires_grad_())
        assert set(kept) <= {x.untyped_storage().data_ptr()}
        output.sum().backward()
    assert between.numel == 64 * DIM  # the weight's gradient; a tile has 640 elements, and all tokens 10240


def test_parameters_names_and_copies_stay_and_a_second_call_sets_other_tiles() -> None:
    module = mlp()
    names, params = list(module.state_dict()), list(module.parameters())
    assert onefold.tiled(onefold.tiled(module, tokens=3), tokens=4) is module
    assert list(module.state_dict()) == names
    assert all(one is other for one, other in zip(module.parameters(), params, strict=True))
    sizes: list[int] = []
    module[0].register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[-2]))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.zero_()
        module(torch.ones(10, DIM))
        assert sizes == [4, 4, 2]
        assert not torch.equal(other(torch.ones(2, DIM)), module(torch.ones(2, DIM)))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tokens": (lambda: onefold.tiled(mlp(), tokens=0), onefold.ConfigError, "a tile has at least one token"),
    "no module": (lambda: onefold.tiled(torch.relu, tokens=4), onefold.ModelError, "tiled() needs a module"),
    "attention": (
        lambda: onefold.tiled(nn.TransformerEncoderLayer(DIM, 2), tokens=4), onefold.ModelError,
        "TransformerEncoderLayer has a MultiheadAttention, whose outputs depend on several tokens",
    ),
    "statistics over tokens": (
        lambda: onefold.tiled(nn.Sequential(nn.BatchNorm1d(DIM)), tokens=4), onefold.ModelError, "has a BatchNorm1d",
    ),
    "two tensors": (
        lambda: onefold.tiled(nn.Bilinear(4, 4, 4), tokens=4)(torch.ones(8, 4), torch.ones(8, 4)), onefold.ConfigError,
        "a tiled Bilinear needs one tensor (…, tokens, width) as its input, but got tensors of: (8, 4), (8, 4)",
    ),
    "another number of rows": (
        lambda: onefold.tiled(nn.Flatten(0), tokens=4)(torch.ones(8, 4)), onefold.ModelError,
        "a tiled Flatten made (16,) of a tile (4, 4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tiled_is_refused_by_name(name: str) -> None:
    call, error, said = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


# -- sharded ----------------------------------------------------------------------------------------------------------


def tower(tokens: int | None, drop: float = 0.0) -> nn.Module:
    layers = nn.ModuleList(MlpBlock(drop=drop) for _ in range(3))
    for layer in layers if tokens else ():
        onefold.tiled(layer.mlp, tokens=tokens)
    return Stack(layers, nn.Linear(DIM, 4))


def learn(model: Any, step: int, tokens: int | None = None) -> Tensor:
    """With `tokens`, tiles the sharded model first."""
    for layer in model.layers if tokens else ():
        onefold.tiled(layer.mlp, tokens=tokens)
    loss = model(batch(step, 2, 9, DIM)).square().mean()
    loss.backward()
    return loss


def compared() -> list[str]:
    """On a rank: what stages do not as stage 0 does, and what is far from the untiled model."""
    found = []
    plain = train(Case(partial(tower, None), learn), 0)
    cases = {
        "before shard": Case(partial(tower, 5), learn),
        "behind shard": Case(partial(tower, None), partial(learn, tokens=5)),
        "dropout, bf16": Case(partial(tower, 5, 0.2), learn, {"precision": "bf16"}),
        "dropout, recomputed blocks": Case(partial(tower, 5, 0.2), learn, {"activations": "checkpoint"}),
    }
    for name, case in cases.items():
        whole = train(case, 0)
        for stage in (1, 2, 3):
            run = train(case, stage)
            found += [f"{name}, stage {stage}: {line}" for line in between(whole, run)]
        far = (torch.stack(run.norms).float() - torch.stack(plain.norms).float()).abs().max().item()
        if "shard" in name and far > 1e-5:
            found.append(f"{name}: norms differ by {far}")
    return found


def test_tiles_train_to_the_same_bits_at_every_stage_before_and_behind_shard() -> None:
    assert run_ranks(2, compared) == [[], []]


def test_a_plan_knows_of_tiles() -> None:
    """It rehearses the model: neither logits nor what is between the layers of MLPs takes memory for all tokens."""

    def planned(way: str, tokens: int | None) -> int:
        model = Speaking(4096, way)
        for layer in model.layers if tokens else ():
            onefold.tiled(layer.mlp, tokens=tokens)
        sample = torch.zeros(1, 40, dtype=torch.long)
        return onefold.plan(model, sample, ranks=2).stages[3].peak_bytes

    whole, tiles = planned("plain", None), planned("tiled", 16)
    logits, between = 40 * 4096 * 4, 40 * 8 * DIM * 4
    assert whole - tiles > 2 * logits + 2 * between
