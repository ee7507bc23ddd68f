"""tiled_cross_entropy(): the loss of a language model over tiles of tokens, so that the logits are never whole.

For each tile: 1 logits of its tokens, in fp32 (on CUDA they stay in 16 bits)  2 their losses, in fp32  3 the gradient
of the logits, in the same memory  4 its products with head and hidden, which are the gradients of hidden and head. So
forward computes the gradients for a loss whose own gradient is 1, and backward multiplies them by what arrives. Nothing
of a tile is kept.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function

from onefold.activations import tiled_loss_cuda
from onefold.errors import ConfigError, StateError
from onefold.model.dtensor_shards import is_dtensor

TOKENS = 1024  # per tile: enough for matrix products at full speed


@torch._disable_dynamo
def tiled_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    tokens: int = TOKENS,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | float | Tensor | None = None,
    shift: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The cross entropy of `hidden @ head_weight.T + bias` and `targets`, computed `tokens` tokens at a time.

    Equal to the loss of fp32 logits to rounding, and so are the gradients of hidden, head and bias; but of the logits
    only those of one tile exist. `hidden` has any shape (…, width), `targets` the same without the width. Targets that
    are `ignore_index` do not count. "mean" divides by the number of the others, or by `num_items`: transformers'
    num_items_in_batch. With `shift`, `targets` are the tokens themselves, and each position predicts the next one.
    Logits are multiplied by `logit_scale`, and then capped softly: `softcap * tanh(logits / softcap)`.

    Gradients are computed in forward, unless none is wanted. A second derivative raises.

    >>> import torch, onefold
    >>> hidden, head = torch.randn(2, 100, 16, requires_grad=True), torch.nn.Linear(16, 50)
    >>> targets = torch.randint(50, (2, 100))
    >>> loss = onefold.tiled_cross_entropy(hidden, head.weight, targets, bias=head.bias, tokens=64)
    >>> plain = torch.nn.functional.cross_entropy(head(hidden).view(-1, 50), targets.view(-1))
    >>> torch.testing.assert_close(loss, plain)
    """
    given = (hidden, head_weight, *(() if bias is None else (bias,)))
    if has_torch_function(given):  # a sharded parameter: its unit is unsharded for the whole call
        return handle_torch_function(
            tiled_cross_entropy, given, hidden, head_weight, targets, bias=bias, tokens=tokens,
            ignore_index=ignore_index, reduction=reduction, num_items=num_items, shift=shift, logit_scale=logit_scale,
            softcap=softcap,
        )  # fmt: skip
    check_tokens("tiled_cross_entropy", tokens)
    _check_settings(reduction, num_items, softcap)
    _check_tensors(hidden=hidden, head_weight=head_weight, targets=targets)
    autocast = _autocast_dtype(hidden.device.type)
    _check_shapes(hidden, head_weight, bias, targets, same_dtype=autocast is None)
    if shift:
        targets = pad(targets, (0, 1), value=ignore_index)[..., 1:]
    dtype = autocast or head_weight.dtype
    form = Form(tokens, ignore_index, logit_scale, softcap, dtype, torch.promote_types(dtype, torch.float32))
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device, torch.long).contiguous()
    share = _share(form, reduction, num_items, targets)
    loss: Tensor = _TiledLoss.apply(rows, head_weight, bias, targets, share, form, _wants(rows, head_weight, bias))
    return loss


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of matrix products where autocast decides it."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def check_tokens(where: str, tokens: object) -> None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"{where}(tokens={tokens!r}): a tile has at least one token; give a whole number from 1 on")


def _check_settings(reduction: str, num_items: object, softcap: float | None) -> None:
    if reduction not in ("mean", "sum"):
        raise ConfigError(f'tiled_cross_entropy(reduction={reduction!r}) is unsupported; use "mean" or "sum"')
    if reduction == "sum" and num_items is not None:
        raise ConfigError('num_items divides the sum of the losses: use reduction="mean" with it, or leave it out')
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ConfigError(
            f"num_items is one number of targets, but has the shape {tuple(num_items.shape)}; give its sum"
        )
    number = isinstance(num_items, Real) and float(num_items) >= 0
    if not (num_items is None or isinstance(num_items, Tensor) or number):
        raise ConfigError(f"num_items={num_items!r} is no number of targets; give one from 0 on, or leave it out")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"tiled_cross_entropy(softcap={softcap!r}): a cap is above 0; None leaves logits uncapped")


def _check_tensors(**given: object) -> None:
    for name, one in given.items():
        if not isinstance(one, Tensor):
            hint = "; give its weight" if isinstance(one, nn.Module) else ""
            raise ConfigError(
                f"tiled_cross_entropy() needs a tensor as {name}, but was given {type(one).__name__}{hint}"
            )


def _check_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, same_dtype: bool) -> None:
    if is_dtensor(weight) or is_dtensor(hidden):
        raise ConfigError(
            "tiled_cross_entropy() takes plain tensors, but the head or hidden is a DTensor, split by 'tp'"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"head_weight has the shape {tuple(weight.shape)}, but hidden {tuple(hidden.shape)} needs a head of "
            f"(vocabulary, {hidden.shape[-1] if hidden.dim() else 'width'})"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"targets have the shape {tuple(targets.shape)}, but hidden {tuple(hidden.shape)} needs "
            f"{tuple(hidden.shape[:-1])}: one target for each token"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise ConfigError(f"targets are numbers of the vocabulary, but their dtype is {targets.dtype}; use torch.long")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias has the shape {tuple(bias.shape)}, but the head needs {tuple(weight.shape[:1])}")
    dtypes = {one.dtype for one in (hidden, weight, bias) if one is not None}
    if len(dtypes) > 1 and same_dtype:
        raise ConfigError(f"hidden is {hidden.dtype} and the head {weight.dtype}; cast one, as for a linear layer")


class Form(NamedTuple):
    """How tiles are computed."""

    tokens: int
    ignore_index: int
    scale: float
    softcap: float | None
    dtype: torch.dtype  # of matrix products
    wide: torch.dtype  # of logits and sums

    @property
    def early(self) -> bool:
        """Whether gradients are divided by the number of tokens before they are rounded to `dtype`. Not in fp16, which
        has no room for numbers so small: the loss scale arrives only in backward."""
        return self.dtype is not torch.float16


class Wants(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


def _wants(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Wants:
    return Wants(*(torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)))


class Share(NamedTuple):
    """What the sum of the losses is multiplied by, and what its gradient is."""

    of_loss: Tensor
    of_gradients: Tensor  # 0 tokens: gradients are 0 and the loss is NaN, as torch has it


def _share(form: Form, reduction: str, num_items: int | float | Tensor | None, targets: Tensor) -> Share:
    """On the device: the host does not learn how many targets count."""
    if reduction == "sum":
        one = torch.ones((), dtype=form.wide, device=targets.device)
        return Share(one, one)
    if num_items is None:
        count = (targets != form.ignore_index).sum().to(form.wide)
        return Share(count.reciprocal(), count.clamp(min=1).reciprocal())
    if isinstance(num_items, Tensor):
        share = num_items.to(targets.device, form.wide, non_blocking=True).reshape(()).reciprocal()
    else:
        share = torch.full((), 1 / num_items if num_items else math.inf, dtype=form.wide, device=targets.device)
    return Share(share, share)


class Gradients(NamedTuple):
    """Gradients of the sum of the losses, or of the loss (`Form.early`)."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        share: Share,
        form: Form,
        wants: Wants,
    ) -> Tensor:
        device = hidden.device.type
        with torch.autocast(device, enabled=False) if _autocast_dtype(device) else nullcontext():
            losses, gradients = _run(hidden, weight, bias, targets, share.of_gradients, form, wants)
        left = torch.ones_like(share.of_gradients) if form.early else share.of_gradients
        ctx.save_for_backward(*gradients, left)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum() * share.of_loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise StateError(
                "tiled_cross_entropy() has no second derivative: its gradients are computed in forward; leave out "
                "create_graph=True, or compute the loss of whole logits"
            )
        *gradients, left = ctx.saved_tensors
        factor = (grad * left).reshape(1)  # not a scalar, which torch would round to the gradient's dtype
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # another backward needs them as they are
        scaled = [
            None if one is None else torch.mul(one, factor, out=torch.empty_like(one) if again else one).to(dtype)
            for one, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, share: Tensor, form: Form, wants: Wants
) -> tuple[Tensor, Gradients]:
    """The loss of each token, and the gradients that are wanted."""
    head, offset = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
    losses = torch.empty(len(hidden), dtype=form.wide, device=hidden.device)
    sums = Gradients(
        torch.empty_like(hidden, dtype=form.dtype) if wants.hidden else None,
        torch.zeros_like(weight, dtype=form.wide) if wants.weight else None,
        torch.zeros(len(weight), dtype=form.wide, device=weight.device) if wants.bias else None,
    )
    fused = tiled_loss_cuda.fits(head) and form.softcap is None and not wants.bias
    for start in range(0, len(hidden), form.tokens):
        tile = slice(start, start + form.tokens)
        rows, counts = hidden[tile].to(form.dtype), targets[tile] != form.ignore_index
        picked = torch.where(counts, targets[tile], 0).unsqueeze(1)
        products = torch.mm(rows, head.t()) if offset is None else torch.addmm(offset, rows, head.t())
        if fused:
            factor = share if form.early else torch.ones_like(share)
            tiled_loss_cuda.losses_and_gradient(
                products, targets[tile], losses[tile], factor, scale=form.scale, ignore_index=form.ignore_index,
                gradient=any(wants),
            )  # fmt: skip
            if any(wants):
                _add_gradients(sums, tile, products, rows, head)
            continue
        logits = products.to(form.wide)
        del products
        slope = _scale_and_cap(logits, form, slope=any(wants))
        total = logits.logsumexp(1, keepdim=True)
        losses[tile] = torch.where(counts, (total - logits.gather(1, picked)).squeeze(1), 0)
        if any(wants):
            logits.sub_(total).exp_().scatter_add_(1, picked, torch.full_like(total, -1))
            logits.mul_((counts * (share * form.scale if form.early else form.scale)).unsqueeze(1))
            _add_gradients(sums, tile, logits if slope is None else logits.mul_(slope), rows, head)
    if sums.weight is not None and form.early:  # in fp16 a sum that is not divided yet may be out of range
        sums = sums._replace(weight=sums.weight.to(weight.dtype))
    return losses, sums


def _scale_and_cap(logits: Tensor, form: Form, *, slope: bool) -> Tensor | None:
    """Scales and caps logits in place; of a cap, its slope if that is asked for."""
    if form.scale != 1:
        logits.mul_(form.scale)
    if form.softcap is None:
        return None
    logits.div_(form.softcap).tanh_()
    found = 1 - logits.square() if slope else None
    logits.mul_(form.softcap)
    return found


def _add_gradients(sums: Gradients, tile: slice, of_logits: Tensor, rows: Tensor, head: Tensor) -> None:
    """Adds the gradients of one tile, whose logits have these gradients."""
    if sums.bias is not None:
        sums.bias.add_(of_logits.sum(0))
    narrow = of_logits.to(head.dtype)
    if sums.hidden is not None:
        torch.mm(narrow, head, out=sums.hidden[tile])
    if sums.weight is None:
        return
    if sums.weight.dtype == head.dtype:
        sums.weight.addmm_(narrow.t(), rows)
    elif head.is_cuda:  # the product of 16-bit numbers is added in fp32
        torch.addmm(sums.weight, narrow.t(), rows, out_dtype=sums.weight.dtype, out=sums.weight)
    else:
        sums.weight.addmm_(narrow.t().to(sums.weight.dtype), rows.to(sums.weight.dtype))
