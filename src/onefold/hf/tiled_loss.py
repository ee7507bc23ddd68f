"""onefold.hf.tile_loss(): a causal model of transformers whose training loss is computed over tiles of tokens.

While a forward with labels runs in training, the model's head gives, instead of logits, an object that knows what they
would be made of (`UnmadeLogits`), and the model's loss function makes the loss of it by `tiled_cross_entropy`. What the
model does to logits between the two (a scale, a soft cap) the object notes; anything else raises. The head is called as
ever, so that hooks run, and its parameters are unsharded as for any module. All else in the model stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from onefold import ConfigError, ModelError, tiled_cross_entropy

ModelT = TypeVar("ModelT", bound=nn.Module)
STATE = "_onefold_tiled_loss"  # attribute of a model
TOKENS = 1024


class TiledLoss:
    """How a model computes its loss: `tokens` in a tile; with `loss_only`, without logits in evaluation too."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.loss_only = tokens, False


def tile_loss(model: ModelT, *, tokens: int = TOKENS) -> ModelT:
    """Let a causal model of transformers compute its training loss over tiles of `tokens` tokens; returns `model`.

    From now on a forward with labels in training mode makes no logits: the `logits` of its output are None, and its
    loss and gradients are the same to rounding (see `onefold.tiled_cross_entropy`). Without labels, and in evaluation
    mode, logits are made as before. Before or after `onefold.shard`; models with PEFT's adapters too. A second call
    sets another number of tokens.

    >>> import torch, transformers, onefold.hf
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    >>> model = onefold.hf.tile_loss(transformers.LlamaForCausalLM(config), tokens=512)
    >>> output = model(input_ids=torch.ones(1, 9, dtype=torch.long), labels=torch.ones(1, 9, dtype=torch.long))
    >>> output.logits is None
    True
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"tile_loss(tokens={tokens!r}): a tile has at least one token; give a whole number from 1 on")
    causal = _causal_model(model)
    _heads(causal)
    if causal.loss_function is not ForCausalLMLoss:
        raise ModelError(
            f"tile_loss() computes transformers' loss of causal models, but that of {type(causal).__name__} is "
            f"{getattr(causal.loss_function, '__name__', causal.loss_function)}; leave tile_loss out"
        )
    if STATE not in causal.__dict__:
        causal.forward = MethodType(_tiled_forward(causal), causal)  # a method: copies of the model get their own
    causal.__dict__[STATE] = TiledLoss(tokens)
    return model


@contextmanager
def loss_only(model: nn.Module, on: bool) -> Iterator[None]:
    """Inside, a model with a tiled loss makes no logits in evaluation either, if it has labels."""
    found = [one.__dict__[STATE] for one in model.modules() if STATE in one.__dict__]
    for one in found:
        one.loss_only = on
    try:
        yield
    finally:
        for one in found:
            one.loss_only = False


def _causal_model(model: nn.Module) -> Any:
    """The model of transformers, which PEFT may have wrapped."""
    base = getattr(model, "get_base_model", None)
    causal = base() if callable(base) else model
    if not callable(getattr(causal, "get_output_embeddings", None)) or not hasattr(type(causal), "loss_function"):
        raise ModelError(f"tile_loss() is for causal models of transformers, and {type(causal).__name__} is none")
    return causal


def _heads(causal: Any) -> list[nn.Linear]:
    """The linear layers that may make the logits: one, or the copies of it that PEFT's modules_to_save holds."""
    head = causal.get_output_embeddings()
    found = [head] if type(head) is nn.Linear else []
    if type(head).__name__ == "ModulesToSaveWrapper":
        found = [head.original_module, *head.modules_to_save.values()]
    if not found or any(type(one) is not nn.Linear for one in found):
        raise ModelError(
            f"tile_loss() needs a head that is an nn.Linear, but that of {type(causal).__name__} is "
            f"{type(head).__name__}; leave tile_loss out, or leave adapters and quantization off the head"
        )
    return found


def _tiled_forward(causal: Any) -> Callable[..., Any]:
    """The forward of the model, as a function of the model, with a tiled loss."""
    own = causal.forward
    method = isinstance(own, MethodType) and own.__self__ is causal
    parameters = list(inspect.signature(own).parameters)
    place = parameters.index("labels") if "labels" in parameters else None

    @wraps(own.__func__ if method else own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = MethodType(own.__func__, self) if method else own
        labels = kwargs.get("labels") if place is None or len(args) <= place else args[place]
        state: TiledLoss = self.__dict__[STATE]
        if labels is None or not (self.training or state.loss_only):
            return run(*args, **kwargs)
        with _unmade_logits(self, state.tokens) as used:
            output = run(*args, **kwargs)
        if not used:
            raise ModelError(
                f"the loss of {type(self).__name__} is not tiled: its forward did not give its head's logits to its "
                f"loss function (TRL's SFTTrainer, for one, computes the loss in tiles by itself); leave tile_loss out"
            )
        return _without_logits(output)

    return forward


@contextmanager
def _unmade_logits(causal: Any, tokens: int) -> Iterator[list[bool]]:
    """Inside, the head makes no logits, and the loss function makes the loss without them. Gives a list that is no
    longer empty when it has."""
    used: list[bool] = []
    usual = causal.loss_function

    def loss(logits: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(logits, UnmadeLogits):
            computed: Tensor = usual(logits, labels, *args, **kwargs)
            return computed
        used.append(True)
        return logits.loss(labels, tokens, *args, **kwargs)

    def forward(self: nn.Linear, hidden: Tensor) -> UnmadeLogits:
        return UnmadeLogits(hidden, self.weight, self.bias)

    heads, own = _heads(causal), causal.__dict__
    before = [(one.__dict__, "forward", one.__dict__.get("forward")) for one in heads]
    before.append((own, "_loss_function", own.get("_loss_function")))
    for one in heads:
        one.__dict__["forward"] = MethodType(forward, one)
    own["_loss_function"] = loss
    try:
        yield used
    finally:
        for attributes, name, value in before:
            attributes.pop(name) if value is None else attributes.update({name: value})


def _without_logits(output: Any) -> Any:
    if isinstance(output, ModelOutput):
        return type(output)(**{name: one for name, one in output.items() if not isinstance(one, UnmadeLogits)})
    return tuple(None if isinstance(one, UnmadeLogits) else one for one in output)


class UnmadeLogits:
    """What logits would be made of. Parameters are attributes: a sharded model keeps those that a module returns
    unsharded until its forward ends."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> None:
        self._parts, self._scale = (hidden, weight, bias), scale
        self._cap: float | None = None  # the factor behind a tanh
        self._inside = 1.0  # the scale before the tanh

    def loss(
        self,
        labels: Tensor,
        tokens: int,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss, by the arguments of transformers' ForCausalLMLoss."""
        hidden, weight, bias = self._parts
        if vocab_size is not None and vocab_size != len(weight):
            raise ModelError(f"the model's vocabulary has {vocab_size} tokens, but its head {len(weight)}")
        return tiled_cross_entropy(
            hidden, weight, labels if shift_labels is None else shift_labels.view(hidden.shape[:-1]), bias=bias,
            tokens=tokens, ignore_index=ignore_index, num_items=num_items_in_batch, shift=shift_labels is None,
            logit_scale=self._scale if self._cap is None else self._inside * self._cap, softcap=self._cap,
        )  # fmt: skip

    # -- what models do to logits ------------------------------------------------------------------------------------

    def float(self) -> UnmadeLogits:
        return self  # of a tile they are fp32

    def __mul__(self, factor: object) -> UnmadeLogits:
        return self._scaled(factor, "logits * …", lambda by: by)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> UnmadeLogits:
        return self._scaled(divisor, "logits / …", lambda by: 1 / by)

    def tanh(self) -> UnmadeLogits:
        if self._cap is not None:
            self._refuse("two tanh")
        other = UnmadeLogits(*self._parts)
        other._cap, other._inside = 1.0, self._scale
        return other

    def _scaled(self, by: object, what: str, factor: Callable[[Any], Any]) -> UnmadeLogits:
        if not isinstance(by, int | float):
            self._refuse(f"{what} by {type(by).__name__}")
        other = UnmadeLogits(*self._parts, self._scale)
        other._cap, other._inside = self._cap, self._inside
        if self._cap is None:
            other._scale *= factor(by)
        else:
            other._cap = self._cap * factor(by)
        return other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is torch.tanh and isinstance(first, UnmadeLogits):
            return first.tanh()
        cls._refuse(f"torch's {getattr(func, '__name__', func)}")

    @staticmethod
    def _refuse(what: object) -> NoReturn:
        raise ModelError(
            f"tile_loss() cannot tile the loss of this model, which uses its logits otherwise than in transformers' "
            f"loss of causal models ({what}); leave tile_loss out"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("logits[…]")

    def __add__(self, other: object) -> NoReturn:
        self._refuse("logits + …")

    __radd__ = __add__

    def __sub__(self, other: object) -> NoReturn:
        self._refuse("logits - …")
