"""The forwards and backwards of a step: of a whole model, or of one stage of a pipeline without its neighbours.

A stage runs its micro-batches in the order of torch's Schedule1F1B. What the neighbours would send lies in buffers that
stay from step to step, one for each micro-batch and direction, as torch's stage has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm.mesh import simulated_ends
from onefold.errors import ConfigError, ModelError
from onefold.model.containers import tensors_in
from onefold.parallel.tied import Tied
from onefold.runtime.engine import engine_of

Loss = Callable[[nn.Module, Any], Tensor]
Backward = Callable[[Tensor], None]
Passes = Callable[[nn.Module, Any, Backward], None]  # a model, the sample of a step, and what runs a backward


def default_loss(model: nn.Module, sample: Any) -> Tensor:
    """The model's own loss if it returns one, else the sum of what it returns."""
    if isinstance(sample, dict):
        output = model(**sample)
    elif isinstance(sample, tuple | list):
        output = model(*sample)
    else:
        output = model(sample)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise ModelError(
            f"{type(model).__name__} returned no tensor with a gradient; give loss=(model, sample) -> loss"
        )
    return floats[0] if floats[0].ndim == 0 else torch.stack([tensor.float().sum() for tensor in floats]).sum()


@dataclass(frozen=True)
class WholeModel:
    """Micro-batches one after the other, all like the sample; gradients of all but the last are accumulated."""

    loss: Loss = default_loss
    micro_batches: int = 1

    def __call__(self, model: nn.Module, sample: Any, backward: Backward) -> None:
        for number in range(self.micro_batches):
            last = number == self.micro_batches - 1
            with nullcontext() if last else engine_of(model).accumulate(None):
                backward(self.loss(model, sample))


class Cut(NamedTuple):
    """How a model is cut beside the ranks that share its states: the simulated rank is the first of `tp` ranks that
    split its tensors, in stage `stage` of a pipeline of `pp`."""

    tp: int = 1
    pp: int = 1
    stage: int = 0
    split: Callable[[nn.Module], Any] | None = None  # splits a model on the meta device over "tp"
    received: Callable[[Tensor], Tensor] | None = None  # what a stage gets from the one before, for these rows of input
    loss: Callable[[Tensor, Tensor], Tensor] | None = None  # of the last stage: (output, targets) -> loss
    tied: tuple[str, ...] = ()  # parameters that the first and the last stage hold

    def check(self, micro_batches: int) -> None:
        if self.tp > 1 and self.pp > 1:
            raise ConfigError(
                f"tp={self.tp} with pp={self.pp}: a step with both cannot be simulated; onefold plan has formulas for "
                f"it, and one of the two can be simulated"
            )
        if micro_batches < self.pp:
            raise ConfigError(
                f"micro_batches={micro_batches} with pp={self.pp}: 1F1B needs one for each stage at least; use "
                f"micro_batches={self.pp} or more"
            )

    def passes(self, loss: Loss | None, micro_batches: int) -> Passes:
        if self.pp == 1:
            return WholeModel(loss or default_loss, micro_batches)
        return StageAlone(self, micro_batches)

    def tie(self, model: nn.Module, plays: str, *, values: bool) -> None:
        """Tells the engine of a sharded stage which of its parameters the other end of the pipeline holds too."""
        if self.tied and self.pp > 1 and self.stage in (0, self.pp - 1):
            Tied(engine_of(model), simulated_ends(self.stage, self.pp, plays=plays, values=values), self.tied)


@dataclass
class StageAlone:
    """One stage of a pipeline without its neighbours. The sample is (inputs, targets) of all micro-batches."""

    cut: Cut
    micro_batches: int
    _inputs: list[Tensor] = field(default_factory=list)  # from the stage before
    _gradients: list[Tensor] = field(default_factory=list)  # from the stage behind

    def __call__(self, model: nn.Module, sample: Any, backward: Backward) -> None:
        rows, targets = (tensor.chunk(self.micro_batches) for tensor in sample)
        first, last = self.cut.stage == 0, self.cut.stage == self.cut.pp - 1
        engine, flying = engine_of(model), deque[tuple[Tensor, Tensor]]()
        if not first and not self._inputs:
            assert self.cut.received is not None
            self._inputs = [self.cut.received(part) for part in rows]

        def forward(number: int) -> None:
            given = rows[number] if first else self._inputs[number].detach().requires_grad_()
            output = model(given)
            if last:
                assert self.cut.loss is not None
                output = self.cut.loss(output, targets[number]) / self.micro_batches
            else:
                engine.comm.meter.count("pipeline", "send", output.nbytes)
            flying.append((given, output))

        def backward_of(number: int) -> None:
            given, output = flying.popleft()
            ends = number == self.micro_batches - 1
            with nullcontext() if ends else engine.accumulate(None):
                if last:
                    backward(output)
                else:
                    output.backward(self._gradients[number])
            if not first:
                assert given.grad is not None
                engine.comm.meter.count("pipeline", "send", given.grad.nbytes)

        ahead = min(self.micro_batches, self.cut.pp - self.cut.stage)
        for number in range(ahead):
            forward(number)
        if not last and not self._gradients:
            like = flying[0][1]
            self._gradients = [torch.zeros_like(like, requires_grad=False) for _ in rows]
        for number in range(self.micro_batches):
            backward_of(number)
            if number + ahead < self.micro_batches:
                forward(number + ahead)
        engine.end_schedule()


WHOLE = Cut()
ONE_BATCH = WholeModel()
