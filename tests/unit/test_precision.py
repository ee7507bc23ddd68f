"""A policy checks itself, fills in what was left out, and says what it decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onefold import ConfigError, Precision, Zero


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"compute": "int8"}, "compute='int8'"),
        ({"compute": "bf16", "wire": "fp16"}, "wire='fp16'"),
        ({"compute": "fp16", "master": "split"}, "needs compute='bf16'"),
        ({"compute": "bf16", "master": "bf16"}, "master='bf16'"),
        ({"compute": "fp32", "grad": "fp32"}, "leave"),
        ({"compute": "bf16", "accumulate": "fp16"}, "accumulate='fp16' is unknown"),
        ({"compute": "fp16", "accumulate": "bf16"}, "found compute='fp16'"),
        ({"accumulate": "bf16"}, "found compute='fp32'"),
        ({"compute": "bf16", "grad": "fp32", "accumulate": "bf16"}, "found grad='fp32'"),
        ({"compute": "bf16", "keep_fp32": nn.LayerNorm(4)}, "keep_fp32"),
    ],
)
def test_policies_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Precision(**fields)


@pytest.mark.parametrize("value", ["half", None, 16, ["bf16"], {"compute": "bf16"}, torch.int8])
def test_an_unknown_precision_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="fp32"):
        Zero(precision=value)


def test_what_is_left_out_depends_on_who_sums_and_where() -> None:
    policy = Precision.of("bf16")
    on_gloo, on_nccl = policy.decided(own_sum=True, cuda=False), policy.decided(own_sum=False, cuda=True)
    assert (on_gloo.wire, on_gloo.grad, on_gloo.master) == (torch.bfloat16, torch.bfloat16, "fp32")
    assert (on_nccl.wire, on_nccl.grad, on_nccl.master) == (torch.float32, torch.bfloat16, "split")
    assert Precision.of("fp16").decided(own_sum=True, cuda=True).master == "fp32"
    assert not Precision.of("fp32").decided(own_sum=True, cuda=False).dtypes(torch.float32).narrow


def test_it_prints_an_answer_to_whether_the_optimizer_is_fp32() -> None:
    text = str(Precision.of("bf16").decided(own_sum=True, cuda=False))
    rows = {line[:20].strip(): line[20:28].strip() for line in text.splitlines()[1:]}
    assert rows["optimizer state"] == rows["master"] == "fp32" and rows["compute"] == rows["gradients travel"] == "bf16"
    assert "everything" in str(Precision())


def test_only_the_outermost_of_the_kept_modules_are_named() -> None:
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.LayerNorm(4))
    assert Precision(compute="bf16", keep_fp32=nn.LayerNorm).kept(model) == ["0.0", "1"]
    assert Precision(compute="bf16", keep_fp32=lambda name, module: name == "0").kept(model) == ["0"]
    with pytest.raises(ConfigError, match="no module"):
        Precision(compute="bf16", keep_fp32=nn.Conv2d).kept(model)
