"""Modules that read other tokens of their sequence, and cannot be told that a mesh cuts sequences over ranks."""

from __future__ import annotations

from torch import nn

from onefold.errors import ModelError

REMEDY = "onefold.sequence_attention(q, k, v, mesh) in a model of your own, onefold.hf.cut_sequences for transformers'"


def check_mixing(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wide = isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1
        if wide or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            raise ModelError(
                f"{name or 'the model'} is a {type(module).__name__}, which reads other tokens of its sequence, and "
                f'the mesh cuts sequences over ranks ("sequence"); use {REMEDY}, or a mesh without that axis'
            )
