"""The built-in GPT over the ranks of "tp", by torch's own means: matrices and vocabulary split, norms the same.

Attention and MLP begin with a matrix split by columns (each rank has some heads, or some of the hidden units) and end
with one split by rows, whose partial results are summed. The token embedding is split by vocabulary, and so are the
logits: no rank ever has all of them, and the loss is computed where they are.
With `sequence`, activations between the matrices are split along the sequence, and so is the work of the norms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from onefold.errors import ConfigError
from onefold.model.survey import ATTRIBUTE
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.train.run.model import GPT


def parallelize(model: GPT, mesh: DeviceMesh, sequence: bool = False) -> GPT:
    """Split a GPT over the "tp" axis of a mesh, in place; without that axis it stays as it is. Then shard() it.

    All ranks of one "tp" are to be given the same tokens. Also for a model on the meta device. Collective.

    >>> import onefold
    >>> from onefold.cost.shapes import Shape
    >>> onefold.init()
    >>> mesh = onefold.mesh(tp=1)
    >>> model = parallelize(GPT(Shape(layers=2, hidden=32, heads=2, seq=16, vocab=64)), mesh)
    >>> model = onefold.shard(model, stage=2, mesh=mesh)
    """
    if ATTRIBUTE in model.__dict__:
        refuse(Call.PARALLELIZE, Situation.SHARDED)
    if "tp" not in (mesh.mesh_dim_names or ()):
        return model
    tp = mesh["tp"] if mesh.ndim > 1 else mesh
    model.shape.check(tp.size(), pp=1)
    parallelize_module(model, tp, _plan(len(model.blocks), sequence))
    if sequence:
        parallelize_module(model.norm, tp, SequenceParallel())
        model.register_forward_pre_hook(lambda _, args: _check_sequence(args[0].shape[1], tp.size()))
    out = Shard(1) if sequence else Replicate()
    whole = PrepareModuleOutput(output_layouts=out, desired_output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model.norm, tp, whole)
    model.loss = SplitLoss()
    model.register_forward_hook(lambda _, args, output: _whole(output))
    return model


def _plan(layers: int, sequence: bool) -> dict[str, Any]:
    """A style for each module that takes part."""
    between = Shard(1) if sequence else Replicate()  # activations between attention and MLP
    block: dict[str, Any] = {
        "attention.qkv": ColwiseParallel(input_layouts=between),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(input_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    plan: dict[str, Any] = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    if sequence:
        block |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
        plan["wpe"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    return plan | {f"blocks.{i}.{name}": style for i in range(layers) for name, style in block.items()}


def _check_sequence(seq: int, tp: int) -> None:
    if seq % tp:
        raise ConfigError(f"a sequence of {seq} tokens cannot be cut over tp={tp} ranks; use a multiple of {tp}")


def _whole(output: Any) -> Any:
    return output.full_tensor() if isinstance(output, DTensor) else output


class SplitLoss(nn.Module):
    """Mean cross-entropy of logits that are split by vocabulary; the same number on every rank."""

    def forward(self, logits: DTensor, targets: Tensor) -> Tensor:
        return _SplitLoss.apply(logits, targets)


class _SplitLoss(torch.autograd.Function):
    """torch computes it inside a context that backward must be in too. Users know nothing of that: here both are."""

    @staticmethod
    def forward(ctx: Any, logits: DTensor, targets: Tensor) -> Tensor:
        with torch.enable_grad(), loss_parallel():
            ctx.logits = logits.detach().requires_grad_(logits.requires_grad)
            loss: Any = F.cross_entropy(ctx.logits, targets)
            ctx.loss = loss.to_local()
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with loss_parallel():
            (found,) = torch.autograd.grad(ctx.loss, ctx.logits, grad)
        return found, None
