"""tiled(): a token-wise module computed over tiles of tokens, and again in backward.

Each tile runs in torch's own checkpoint, which keeps the tile's input, a view, and nothing that the module makes of it.
In backward one tile after the other is computed again, so what the module makes exists for one tile at a time. torch
restores the random numbers of each tile, and autograd adds up the gradients of parameters over tiles before they leave
backward: Onefold sees one gradient of each parameter, as without tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

from onefold.activations.tiled_loss import check_tokens
from onefold.errors import ConfigError, ModelError
from onefold.model.containers import tensors_in

ModuleT = TypeVar("ModuleT", bound=nn.Module)
MIXING = (_NormBase, _ConvNd, nn.GroupNorm, nn.MultiheadAttention, nn.RNNBase)  # whose outputs depend on other tokens
UNTILED = "_onefold_untiled"  # attribute of a tiled forward: the forward before


def tiled(module: ModuleT, *, tokens: int) -> ModuleT:
    """Compute a token-wise module, such as an MLP, over tiles of `tokens` tokens, in place; returns `module`.

    What the module makes between its input and its output exists for one tile at a time, in backward too, where each
    tile is computed again. Parameters, their names and hooks stay as they are; outputs and gradients are those of the
    module to rounding. The input is one tensor (…, width); tiles are shaped (1, …, tokens, width), and the last one may
    be shorter. Before or after `shard`. A second call sets another number of tokens.

    >>> import torch, onefold
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> x = torch.randn(2, 100, 8)
    >>> whole = mlp(x)
    >>> torch.testing.assert_close(onefold.tiled(mlp, tokens=64)(x), whole)
    """
    check_tokens("tiled", tokens)
    if not isinstance(module, nn.Module):
        raise ModelError(f"tiled() needs a module, but was given {type(module).__name__}")
    mixing = next((part for part in module.modules() if isinstance(part, MIXING)), None)
    if mixing is not None:
        raise ModelError(
            f"{type(module).__name__} has a {type(mixing).__name__}, whose outputs depend on several tokens, so it "
            f"cannot be computed in tiles; tile a part of the model that treats each token alone, such as an MLP"
        )
    forward = _own_forward(module)

    @wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return _run_tiles(type(self).__name__, partial(forward, self), tokens, args, kwargs)

    setattr(run, UNTILED, forward)
    module.forward = MethodType(run, module)  # a method: deep copies of the module get one of their own
    return module


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module that is not tiled, as a function of the module."""
    forward = module.forward
    if not isinstance(forward, MethodType) or forward.__self__ is not module:  # compiled, or another function
        return wraps(forward)(lambda self, *args, **kwargs: forward(*args, **kwargs))
    function: Callable[..., Any] = forward.__func__
    return getattr(function, UNTILED, function)


def _run_tiles(
    name: str, forward: Callable[..., Any], tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = list(tensors_in([*args, *kwargs.values()]))
    if len(given) != 1 or given[0].dim() < 2 or not any(given[0] is one for one in (*args, *kwargs.values())):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given) or "none"
        raise ConfigError(
            f"a tiled {name} needs one tensor (…, tokens, width) as its input, but got tensors of: {shapes}"
        )
    whole, grad = given[0], torch.is_grad_enabled()

    def one(tile: Tensor) -> Tensor:
        output = forward(
            *(tile if value is whole else value for value in args),
            **{key: tile if value is whole else value for key, value in kwargs.items()},
        )
        if not isinstance(output, Tensor) or output.shape[:-1] != tile.shape[:-1]:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ModelError(
                f"a tiled {name} made {found} of a tile {tuple(tile.shape)}: tiled() needs a module that returns one "
                f"tensor, with one row for each token"
            )
        return output

    rows = whole.reshape(*[1] * (whole.dim() - 2), -1, whole.shape[-1])
    tiles = rows.split(tokens, dim=-2)
    outputs = [checkpoint(one, tile, use_reentrant=False) if grad else one(tile) for tile in tiles]
    return torch.cat(outputs, dim=-2).reshape(*whole.shape[:-1], outputs[0].shape[-1])
