"""One step of Adam, AdamW or SGD on moments in a small form (codec.py), and its arithmetic in operations of torch.

Moments are widened to fp32, updated, and rounded. Every operation is rounded by itself, as in cpu.c and cuda_small.py,
which do the same in one pass: all three give the same bits, so a rank without a compiler agrees with the others.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import Span
from onefold.optim.kernels.codec import (
    BLOCK,
    bits_for_8,
    bits_for_bf16,
    from_8bit,
    to_8bit,
)
from onefold.optim.kernels.rule import MOMENTS, SCALE, Rule, moments_of, next_step
from onefold.state.random_rounding import Keys, keys_of, random_bits, to_bf16


class Moment(NamedTuple):
    """A moment in a small form: bf16 values, or codes of 8 bits and the scales of their blocks."""

    codes: Tensor
    scales: Tensor | None
    second: bool

    def at(self, part: Span) -> Moment:
        """Some elements of it, from the first of a block."""
        scales = None if self.scales is None else self.scales[part.start // BLOCK : -(-part.stop // BLOCK)]
        return self._replace(codes=self.codes[part.start : part.stop], scales=scales)

    def widened(self) -> Tensor:
        return self.codes.float() if self.scales is None else from_8bit(self.codes, self.scales, second=self.second)

    def round_from(self, values: Tensor, random: Tensor | None, bad: Tensor | None = None) -> None:
        """Sets it to fp32 values, rounded by 32 random bits each, or to the nearest; not if the flag `bad` is set."""
        if self.scales is None:
            new = to_bf16(values) if random is None else to_bf16(values, bits_for_bf16(random, second=self.second))
            made = [(self.codes, new)]
        else:
            given = {} if random is None else {"random": bits_for_8(random, second=self.second)}
            made = list(zip((self.codes, self.scales), to_8bit(values, second=self.second, **given), strict=True))
        for old, new in made:
            old.copy_(new if bad is None else torch.where(bad, old, new))


class SmallStep(NamedTuple):
    """A step on some elements of one parameter."""

    rule: Rule
    moments: tuple[Moment, ...]
    keys: Keys
    start: int  # the index of the first element in its parameter, of which random bits are a function


def next_small_step(
    cls: type[torch.optim.Optimizer], group: dict[str, Any], state: dict[str, Any], numel: int, device: torch.device,
    form: str,
) -> SmallStep:  # fmt: skip
    """The next step of a whole parameter of no name, as next_step counts it."""
    rule = next_step(cls, group, state, numel, device, form)
    return SmallStep(rule, moments_in(cls, group, state), keys_of(0, "", int(state["step"])), 0)


def moments_in(cls: type[torch.optim.Optimizer], group: dict[str, Any], state: dict[str, Any]) -> tuple[Moment, ...]:
    return tuple(Moment(state[key], state.get(key + SCALE), bool(MOMENTS[key])) for key in moments_of(cls, group))


def update(small: SmallStep, grad: Tensor, value: Tensor, factor: float | Tensor, bad: Tensor | None = None) -> None:
    """Updates fp32 `value` and the moments in operations of torch; not if the device flag `bad` is set."""
    rule, before, flag = small.rule, value, None if bad is None else bad.bool()
    grad = grad.float() * (factor if isinstance(factor, Tensor) else _fp32(factor))
    if rule.decay and not rule.decoupled:
        grad = grad + value * _fp32(rule.decay)
    wide = [moment.widened() for moment in small.moments]
    if rule.adam:
        wide[0] = wide[0] * _fp32(rule.beta1) + grad * _fp32(1 - rule.beta1)
        wide[1] = wide[1] * _fp32(rule.beta2) + grad * grad * _fp32(1 - rule.beta2)
        root = wide[1].double().sqrt().float()  # torch's root of fp32 vectors may be off by the last bit
        below = root * _fp32(1 / rule.root) + _fp32(rule.eps)
        value = value * _fp32(rule.shrink) - wide[0] * _fp32(rule.size) / below
    else:
        wide[0] = wide[0] * _fp32(rule.beta1) + grad
        step = grad + wide[0] * _fp32(rule.beta1) if rule.nesterov else wide[0]
        value = value - step * _fp32(rule.size)
    before.copy_(value if flag is None else torch.where(flag, before, value))
    random = random_bits(small.keys, small.start, grad.numel(), grad.device)
    for moment, values in zip(small.moments, wide, strict=True):
        moment.round_from(values, random, flag)


def _fp32(number: float) -> float:
    """A number as fp32 rounds it, as the kernels get it."""
    return ctypes.c_float(number).value
