"""tiled_cross_entropy(): the loss of whole logits, which never exist, and its gradients, at every stage."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from tests.harness import run_ranks
from tests.models import Speaking
from tests.parity.stage3.compare import Case, batch, between, train

TOKENS, WIDTH, VOCABULARY = 2 * 37, 16, 50
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, bias and targets, of which some are ignored."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 37, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
    targets = torch.randint(VOCABULARY, (2, 37))
    made = [one.to(dtype).requires_grad_() for one in (hidden, weight, bias)]
    return made[0], made[1], made[2], torch.where(targets % 5 == 0, -100, targets)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **way: Any) -> Tensor:
    """The loss of whole logits in fp32, as transformers has it."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * way.get("logit_scale", 1.0)
    if cap := way.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if way.get("shift"):
        targets = F.pad(targets, (0, 1), value=-100)[..., 1:]
    items = way.get("num_items")
    reduction = "sum" if items is not None else way.get("reduction", "mean")
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss if items is None else loss / items


WAYS: list[dict[str, Any]] = [
    {}, {"reduction": "sum"}, {"num_items": 17}, {"num_items": torch.tensor(17)}, {"shift": True},
    {"softcap": 3.0, "logit_scale": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("dtype", CLOSE)
def test_loss_and_gradients_are_those_of_whole_logits_to_rounding(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = given(dtype)
    for way in WAYS:
        for tokens in (1, 20, 1000):  # 74 = 3 · 20 + 14
            for leaves in ([hidden, weight, bias], [hidden, weight]):
                args = hidden, weight, targets
                loss = onefold.tiled_cross_entropy(*args, bias=bias if len(leaves) == 3 else None, tokens=tokens, **way)
                whole = plain(hidden, weight, bias if len(leaves) == 3 else None, targets, **way)
                assert loss.dtype == whole.dtype
                torch.testing.assert_close(loss, whole, rtol=2e-6, atol=0)
                found = torch.autograd.grad(0.3 * loss, leaves)
                for one, other in zip(found, torch.autograd.grad(0.3 * whole, leaves), strict=True):
                    assert one.dtype is dtype
                    assert (one - other).double().norm() <= CLOSE[dtype] * other.double().norm(), (way, tokens)


def test_the_head_gradient_of_16_bits_is_summed_in_fp32() -> None:
    hidden, weight, _, targets = given(torch.bfloat16)
    many = [one.expand(64, *one.shape) for one in (hidden, targets)]
    loss = onefold.tiled_cross_entropy(many[0], weight, many[1], tokens=TOKENS)  # 64 equal tiles
    once = onefold.tiled_cross_entropy(hidden, weight, targets, tokens=TOKENS)
    pair = [torch.autograd.grad(one, weight)[0].double() for one in (loss, once)]
    assert (pair[0] - pair[1]).norm() < 4e-3 * pair[1].norm()  # one rounding; summed in bf16: 1e-2 and more


def test_fp16_gradients_neither_vanish_nor_overflow_before_the_loss_scale_arrives() -> None:
    hidden, weight, _, targets = given(torch.float16)
    loss = onefold.tiled_cross_entropy(hidden, weight, targets, tokens=20, num_items=10**6)
    whole = plain(hidden.float(), weight.float(), None, targets, num_items=10**6)
    scale = 2.0**20
    found = torch.autograd.grad(loss * scale, [hidden, weight])
    for one, other in zip(found, torch.autograd.grad(whole * scale, [hidden, weight]), strict=True):
        assert (one - other).norm() < 2e-3 * other.norm()


def test_where_nothing_counts_the_loss_is_nan_and_gradients_are_zero_as_in_torch() -> None:
    hidden, weight, bias, targets = given()
    loss = onefold.tiled_cross_entropy(hidden, weight, torch.full_like(targets, -1), bias=bias, ignore_index=-1)
    assert loss.isnan()
    assert not any(one.any() for one in torch.autograd.grad(loss, [hidden, weight, bias]))


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_theirs() -> None:
    hidden, weight, bias, targets = given()
    with torch.autocast("cpu", torch.bfloat16):
        loss = onefold.tiled_cross_entropy(hidden, weight, targets, bias=bias, tokens=20)
        whole = plain(hidden, weight, bias, targets)
    for one, other in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(whole, [hidden, weight]), strict=True
    ):
        assert one.dtype is torch.float32
        assert (one - other).norm() < CLOSE[torch.bfloat16] * other.norm()


class Seen(TorchDispatchMode):
    """Notes the largest tensor that is made, and how many matrix products are."""

    largest = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return result


def test_logits_of_more_than_a_tile_never_exist_and_nothing_of_a_tile_is_kept() -> None:
    tokens, vocabulary = 640, 512
    hidden, weight = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(vocabulary, WIDTH, requires_grad=True)
    targets, kept = torch.randint(vocabulary, (tokens,)), []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one)
    with Seen() as seen, keep:
        onefold.tiled_cross_entropy(hidden, weight, targets, tokens=16).backward()
    assert seen.largest <= max(tokens * WIDTH, vocabulary * WIDTH) * 4  # 40 KiB; logits are 1280 KiB
    assert sum(kept) <= hidden.nbytes + weight.nbytes + 64
    assert seen.products == 3 * tokens // 16


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    hidden, weight, _, targets = given()

    def products(one: Tensor, other: Tensor) -> int:
        with Seen() as seen:
            onefold.tiled_cross_entropy(one, other, targets, tokens=TOKENS)
        return seen.products

    assert products(hidden, weight) == 3
    assert products(hidden, weight.detach()) == 2  # a frozen head
    assert products(hidden.detach(), weight.detach()) == 1
    with torch.no_grad():
        assert products(hidden, weight) == 1


def test_a_graph_may_be_used_twice_and_a_second_derivative_raises_by_name() -> None:
    hidden, weight, _, targets = given()
    loss = onefold.tiled_cross_entropy(hidden, weight, targets, tokens=20)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(onefold.StateError, match=r"tiled_cross_entropy\(\) has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_host_learns_nothing_from_the_device() -> None:
    """Fake tensors have no values, and raise where one is asked for."""
    with FakeTensorMode():
        hidden, weight, bias, targets = given(torch.bfloat16)
        for way in [*WAYS[:3], {"num_items": torch.ones((), dtype=torch.long)}, *WAYS[4:]]:
            onefold.tiled_cross_entropy(hidden, weight, targets, bias=bias, tokens=20, **way).backward()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": 0}, "a tile has at least one token"),
    "half a token": ({"tokens": 1.5}, "a tile has at least one token"),
    "targets of another shape": ({"targets": torch.zeros(37, 2).long()}, r"needs \(2, 37\): one target for each token"),
    "targets of another dtype": ({"targets": torch.zeros(2, 37)}, "dtype is torch.float32; use torch.long"),
    "a head of another width": ({"head_weight": torch.zeros(50, 8)}, r"needs a head of \(vocabulary, 16\)"),
    "a bias of another width": ({"bias": torch.zeros(8)}, r"bias has the shape \(8,\), but the head needs \(50,\)"),
    "another dtype": ({"head_weight": torch.zeros(50, 16).half()}, "and the head torch.float16; cast one"),
    "another reduction": ({"reduction": "none"}, 'use "mean" or "sum"'),
    "two divisors": ({"reduction": "sum", "num_items": 3}, 'use reduction="mean" with it'),
    "a cap of 0": ({"softcap": 0.0}, "a cap is above 0"),
    "fewer than no items": ({"num_items": -1}, "num_items=-1 is no number of targets; give one from 0 on"),
    "items that are no number": ({"num_items": "3"}, "num_items='3' is no number of targets"),
    "items of each rank": ({"num_items": torch.tensor([3, 4])}, r"has the shape \(2,\); give its sum"),
    "a head that is a module": ({"head_weight": torch.nn.Linear(16, 50)}, "was given Linear; give its weight"),
    "targets in a list": ({"targets": [1, 2]}, "needs a tensor as targets, but was given list"),
}


def test_bad_input_is_one_clear_message() -> None:
    hidden, weight, _, targets = given()
    for wrong, said in REFUSED.values():
        with pytest.raises(onefold.ConfigError, match=said):
            onefold.tiled_cross_entropy(**{"hidden": hidden, "head_weight": weight, "targets": targets} | wrong)


@pytest.mark.parametrize("none", [0, 0.0, torch.tensor(0)])
def test_a_batch_without_a_target_has_a_loss_that_is_no_number_as_in_torch(none: Any) -> None:
    hidden, weight, _, targets = given()
    loss = onefold.tiled_cross_entropy(hidden, weight, torch.full_like(targets, -100), num_items=none)
    assert loss.isnan() and onefold.tiled_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()


# -- sharded ----------------------------------------------------------------------------------------------------------


def speak(model: Any, step: int) -> Tensor:
    """Two micro-batches, of which the first is accumulated."""
    losses = []
    for micro in (0, 1):
        tokens = (batch(step, 3, 9, micro=micro).abs() * 20).long().clamp(max=63)
        with onefold.accumulate(model, reduce="each") if micro == 0 else nullcontext():
            loss = model(tokens)
            if model.way == "hidden":
                head = model.head
                loss = onefold.tiled_cross_entropy(loss, head.weight, tokens, bias=head.bias, shift=True, tokens=5)
            loss.backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def compared() -> list[str]:
    """On a rank: what stages 1 to 3 do not as stage 0 does, and what is far from the plain loss."""
    found = []
    for tied, fields in ((False, {"precision": "bf16"}), (True, {})):
        usual = train(Case(partial(Speaking, 64, "plain", tied), speak), 0, **fields)
        for way in ("tiled", "hidden"):
            case = Case(partial(Speaking, 64, way, tied), speak)
            name = f"{way}, tied: {tied}, {fields}"
            whole, close = train(case, 0, **fields), 2e-2 if fields else 1e-5
            for stage in (1, 2, 3):
                run = train(case, stage, **fields)
                found += [f"{name}, stage {stage}: {line}" for line in between(whole, run)]
            for what, one, other in (("losses", run.losses, usual.losses), ("norms", run.norms, usual.norms)):
                far = (torch.stack(one).float() - torch.stack(other).float()).abs().max().item()
                found += [f"{name}: {what} differ by {far}"] if far > close else []
    return found


def test_every_stage_trains_to_the_same_bits_and_as_the_plain_loss_inside_forward_and_behind_it() -> None:
    assert run_ranks(2, compared) == [[], []]
