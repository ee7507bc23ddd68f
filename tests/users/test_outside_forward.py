"""Parameters used outside the root's forward: as in torch where a loss is computed, else an error and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import DIM, Clip, Stack, Tied, blocks
from tests.parity.stage3.compare import batch, equal

Loss = Callable[[nn.Module, int], Tensor]


def weight_decay(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())


def decay_of_some(model: nn.Module, step: int) -> Tensor:
    """Views of parameters, kept over uses of other units, and lists of parameters."""
    out = model(batch(step))
    turned, row = model.layers[0].up.weight.t(), model.head.weight[1]
    stacked = torch.cat([p.reshape(-1) for p in model.layers[1].parameters()])
    return out.square().mean() + (batch(step, 2, 2 * DIM) @ turned.t()).mean() + row.square().sum() + stacked.sum()


def second_head(model: nn.Module, step: int) -> Tensor:
    """One operation on parameters of two units."""
    out, first, last = model(batch(step)), model.layers[0].up, model.layers[2].up
    return out.square().mean() + torch.nn.functional.linear(batch(step), last.weight, first.bias).mean()


def contrast(model: nn.Module, step: int) -> Tensor:
    image, text = model.encode_image(batch(step)), model.encode_text(batch(step, micro=1))
    return (model.logit_scale.exp() * image @ text.t()).diag().mean().square()


def scaled_outputs(model: nn.Module, step: int) -> Tensor:
    """By submodules alone: a training forward of a part comes before the loss."""
    image, text = model.visual(batch(step)), model.text(batch(step, micro=1))
    return (model.logit_scale.exp() * (image @ model.projection) @ text.t()).diag().mean().square()


def stack() -> nn.Module:
    return Stack(blocks(3), nn.Linear(DIM, 3))


BOTH = {"methods": ("encode_image", "encode_text")}
LOSSES: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "weight decay": (stack, weight_decay, {}),
    "weight decay of a tied weight": (Tied, weight_decay, {}),
    "weight decay, recomputed": (stack, weight_decay, {"activations": "checkpoint"}),
    "views": (stack, decay_of_some, {}),
    "two units at once": (stack, second_head, {}),
    "methods": (Clip, contrast, BOTH),
    "methods, bf16": (Clip, contrast, BOTH | {"precision": "bf16"}),
    "submodules": (Clip, scaled_outputs, {}),
}


def trained(name: str, stage: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    build, loss_of, fields = LOSSES[name]
    torch.manual_seed(5)
    model = onefold.shard(build(), stage=stage, bucket_bytes=1 << 12, timeout_s=10.0, **fields)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    with onefold.full_parameters(model):
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def stages_differ(name: str) -> list[str]:
    """What a stage did not do as stage 0 did."""
    losses, params = trained(name, 0)
    assert all(torch.isfinite(loss) for loss in losses)
    found = []
    for stage in (1, 2, 3):
        other_losses, other = trained(name, stage)
        found += [f"stage {stage}: loss {i}" for i, loss in enumerate(other_losses) if not equal(loss, losses[i])]
        found += [f"stage {stage}: {key}" for key in params if not equal(other[key], params[key])]
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_uses_parameters_outside_forward_trains_to_the_same_bits_at_every_stage(name: str) -> None:
    assert run_ranks(2, stages_differ, name) == [[], []]


def refused() -> list[str]:
    """What did not raise at stage 3, or gave NaN, where no loss is due or no gradient wanted."""
    model = onefold.shard(Clip(), stage=3, bucket_bytes=1 << 12, timeout_s=10.0)
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    uses: dict[str, Callable[[], Any]] = {
        "scale": lambda: model.logit_scale.exp(),
        "average": lambda: [average[name].lerp_(p, 0.1) for name, p in model.named_parameters()],
        "decay": lambda: sum(p.square().sum() for p in model.parameters()),
        "method": lambda: model.encode_text(batch(0)),
        "clamp": lambda: model.logit_scale.clamp_(0, 4.6),
        "merge": lambda: setattr(model.projection, "data", model.projection.data + 1),
    }
    wrong = []
    for turn in range(2):
        for name, use in uses.items():
            try:
                with torch.no_grad():
                    use()
                wrong.append(f"{turn}: {name} did not raise")
            except onefold.StateError as error:
                if "full_parameters" not in str(error) or "methods=" not in str(error):
                    wrong.append(f"{turn}: {name}: {error}")
        model(batch(0), batch(1)).sum().backward()
    loss = model(batch(0), batch(1)).sum()
    for due in (True, False):  # a loss is due, and autograd would not see this; PEFT's merge() does it
        try:
            model.projection.data += 1
            wrong.append(f"a write through .data did not raise, {due=}")
        except onefold.StateError as error:
            if "full_parameters" not in str(error):
                wrong.append(str(error))
        if due:
            loss.backward()
    with torch.no_grad(), onefold.full_parameters(model):
        for use in list(uses.values())[:4]:
            use()
    return wrong


def test_a_use_that_no_loss_asks_for_raises_and_names_the_remedy() -> None:
    assert run_ranks(2, refused) == [[], []]


def stepped_plainly(cls: str, options: dict[str, Any]) -> str:
    model = onefold.shard(stack(), stage=3, timeout_s=10.0)
    optimizer = getattr(torch.optim, cls)(model.parameters(), lr=0.1, **options)
    model(batch(0)).sum().backward()
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    try:
        optimizer.step()
    except onefold.StateError as error:
        return str(error)
    return "did not raise"


@pytest.mark.parametrize(("cls", "options"), [("SGD", {}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True})])
def test_a_plain_torch_optimizer_hears_of_onefolds(cls: str, options: dict[str, Any]) -> None:
    for said in run_ranks(2, stepped_plainly, cls, options):
        assert "onefold.Optimizer" in said and "full_parameters" in said


def evaluated() -> list[bool]:
    """Named methods run without a gradient, alone and inside each other, and after an error in one."""
    torch.manual_seed(3)
    plain = Clip()
    x = batch(0)
    with torch.no_grad():
        want = plain.encode_image(x), plain.encode_text(x), plain(x, x)
    model = onefold.shard(plain, stage=3, timeout_s=10.0, methods=("encode_image", "encode_text"))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model.encode_image(torch.ones(2, DIM + 1))
    with torch.no_grad():
        have = model.encode_image(x), model.encode_text(x), model(x, x)
    return [torch.equal(a, b) for a, b in zip(have, want, strict=True)]


def test_named_methods_evaluate() -> None:
    assert run_ranks(2, evaluated) == [[True] * 3] * 2


def test_methods_are_checked() -> None:
    onefold.init()
    with pytest.raises(onefold.ConfigError, match="methods='encode'"):
        onefold.Zero(methods="encode")  # type: ignore[arg-type]
    with pytest.raises(onefold.ModelError, match="'encode_sound'"):
        onefold.shard(Clip(), methods=("encode_sound",))
