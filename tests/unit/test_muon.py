"""onefold.Muon without processes: which parameters it takes, the arithmetic of its matrices, and what it refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim._muon import _adjust_lr  # type: ignore[attr-defined]

import onefold
from onefold.errors import OptimizerError
from onefold.model.blocks import find_blocks
from onefold.optim.muon_placement import ADAMW, MUON, decide
from onefold.optim.newton_schulz import Muon, lr_ratio, places_of, work_of
from onefold.optim.whole_tensors import check_room
from tests.models import GPT_VOCAB, MODELS


def placed(model: nn.Module, **said: Any) -> dict[str, tuple[str, object]]:
    found = decide(model, find_blocks(model, None), said.get("place", {}), said.get("split", {}))
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[key]: (one.by, one.matrices if one.by == MUON else one.why) for key, one in found.items()}


def test_modules_and_shapes_decide() -> None:
    experts = placed(MODELS["experts"].build(), split={"*.mix.weight": 2}, place={"*.router.weight": ADAMW})
    assert {name for name, (by, _) in experts.items() if by == MUON} == {
        f"layers.{i}.{name}" for i in range(2) for name in ("up", "down", "mix.weight")
    }
    assert experts["layers.0.up"] == (MUON, "stack") and experts["layers.0.mix.weight"] == (MUON, (24, 24))
    assert experts["head.weight"] == (ADAMW, "head") and experts["tokens.weight"] == (ADAMW, "embedding")
    assert experts["layers.0.router.weight"] == (ADAMW, "said by place=")
    tied = placed(MODELS["gpt-tied"].build())
    assert tied["tokens.weight"] == (ADAMW, "embedding") and tied["layers.2.down.weight"] == (MUON, "whole")
    conv = placed(MODELS["conv"].build())
    assert conv["body.3.weight"] == (MUON, "flat") and conv["head.weight"] == (ADAMW, "head")
    assert placed(nn.Sequential(nn.Conv1d(1, 4, 1), nn.Conv2d(2, 1, 3), nn.Linear(4, 4), nn.Linear(4, 4))) == {
        "0.weight": (ADAMW, "no matrix"), "0.bias": (ADAMW, "vector"), "1.weight": (ADAMW, "no matrix"),
        "1.bias": (ADAMW, "vector"), "2.weight": (MUON, "whole"), "2.bias": (ADAMW, "vector"),
        "3.weight": (ADAMW, "head"), "3.bias": (ADAMW, "vector"),
    }  # fmt: skip
    assert placed(nn.Linear(3, 3)) == {"weight": (MUON, "whole"), "bias": (ADAMW, "vector")}


def test_a_parameter_that_modules_share_has_the_names_of_all() -> None:
    for name in ("head.weight", "head.*", "tokens.weight"):
        tied = placed(MODELS["gpt-tied"].build(), place={name: MUON}, split={name: (1, GPT_VOCAB - 1)})
        assert tied["tokens.weight"] == (MUON, (1, GPT_VOCAB - 1))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"place": {"heads.*": MUON}}, "place= names 'heads.\\*', which no parameter is called"),
        ({"split": {"head.weights": 2}}, "split= names 'head.weights'"),
        ({"place": {"*.up.bias": MUON}}, "cannot update layers.0.up.bias: a tensor of shape \\(48,\\) is no matrix"),
        ({"place": {"*": "lion"}}, "says 'lion' of tokens.weight; say 'muon' or 'adamw'"),
        ({"place": {"*": ADAMW}}, "finds no matrix of a hidden layer"),
        ({"place": ["head.weight"]}, "place=\\['head.weight'\\] is no dict of names"),
        ({"split": {"head.weight": 2}}, "split= names 'head.weight', but AdamW updates head.weight \\(head\\)"),
        ({"split": {"*.up.weight": 2.0}}, "says 2.0 of layers.0.up.weight; say the number of equal parts"),
        ({"split": {"*.up.weight": "qkv"}}, "says 'qkv' of layers.0.up.weight; say the number of equal parts"),
        ({"split": {"*.up.weight": 5}}, "into 5 equal parts, but it has 48 rows"),
        ({"split": {"*.up.weight": (40, 7)}}, "rows of \\(40, 7\\) are 47, but the tensor's shape is \\(48, 24\\)"),
    ],
)
def test_what_cannot_be_placed_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        placed(MODELS["gpt"].build(), **said)


def test_a_tensor_that_no_rank_can_update_is_refused() -> None:
    check_room({"small": 10, "large": 1 << 30}, 1 << 30)
    with pytest.raises(OptimizerError, match=r"^large is too large to be updated as a whole tensor.*such as AdamW"):
        check_room({"small": 10, "large": 1 << 30}, 1 << 20)


def updated(values: torch.Tensor, grads: torch.Tensor, **settings: Any) -> torch.Tensor:
    param = nn.Parameter(values.clone())
    optimizer = Muon([param], lr=0.1, **settings)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def test_matrices_of_one_tensor_are_updated_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    values, grads = torch.randn(24, 5, generator=generator), torch.randn(3, 24, 5, generator=generator)
    parts = (4, 4, 4, 12)
    for rule in ("original", "match_rms_adamw"):
        given: dict[str, Any] = {"adjust_lr_fn": rule, "ns_dtype": "fp32"}
        alone = [updated(v, g, **given) for v, g in zip(values.split(parts), _by_parts(grads, parts), strict=True)]
        torch.testing.assert_close(updated(values, grads, matrices=parts, **given), torch.cat(alone))
        stack = updated(values.view(4, 6, 5), grads.view(3, 4, 6, 5), matrices="stack", **given)
        each = [updated(v, g, **given) for v, g in zip(values.split(6), _by_parts(grads, (6,) * 4), strict=True)]
        torch.testing.assert_close(stack, torch.stack(each))


def _by_parts(grads: torch.Tensor, parts: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return grads.split(parts, dim=1)


def test_settings_that_torchs_muon_has_too_have_its_defaults() -> None:
    """Bits are compared with torch's at fewer steps of Newton-Schulz, in tests/parity/test_whole_tensor.py."""
    theirs = inspect.signature(torch.optim.Muon).parameters
    for ours in (inspect.signature(onefold.Muon).parameters, inspect.signature(Muon).parameters):
        shared = [name for name in theirs if name in ours and name != "params"]
        assert {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"} <= set(shared)
        assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]


def test_learning_rates_are_scaled_as_torch_does() -> None:
    for shape in ((4, 9), (9, 4), (5, 5)):
        for rule in (None, "original", "match_rms_adamw"):
            assert 0.3 * lr_ratio(shape, rule) == _adjust_lr(0.3, rule, torch.Size(shape))
    assert lr_ratio((7, 4, 9), None) == lr_ratio((4, 9), None)


def test_work_is_counted_matrix_by_matrix() -> None:
    assert work_of((8, 4), "whole") == 8 * 4 * 4 and work_of((6, 8, 4), "stack") == 6 * work_of((8, 4), "whole")
    assert work_of((8, 4), (2, 2, 4)) == 2 * (2 * 4 * 2) + 4 * 4 * 4
    assert [place.shape for place in places_of((9, 2, 3, 3), "flat")] == [(9, 18)]
