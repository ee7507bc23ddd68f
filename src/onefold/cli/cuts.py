"""The GPT of `verify` and `simulate`, cut over the ranks of "tp" or into the stages of a pipeline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.cli.subject import TrialOptions
from onefold.comm.mesh import Mesh
from onefold.cost.shapes import Shape
from onefold.cost.work import Grid, grid_of
from onefold.errors import ConfigError
from onefold.observe.passes import Cut
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero
from onefold.train.run.cut import Part, loss_of
from onefold.train.run.model import Block

TIED = "wte.weight"  # held by the first and the last stage


@dataclass(frozen=True)
class Trial:
    """A model of a few steps, and how it is cut over the ranks."""

    options: TrialOptions
    grid: Grid
    zero: Zero

    @classmethod
    def of(cls, options: TrialOptions, ranks: int, zero: Zero) -> Trial:
        """Raises, before anything runs, for what cannot be cut so."""
        grid = grid_of(ranks, tp=options.tp, pp=options.pp)
        shape = options.shape()
        if grid.tp * grid.pp > 1:
            axis = "tp" if grid.tp > 1 else "pp"
            if shape is None:
                raise ConfigError(
                    f"--{axis} cuts the built-in GPT: give --model, or --layers with --hidden and --heads"
                )
            shape.check(grid.tp, grid.pp)
        Cut(grid.tp, grid.pp).check(options.micro_batches)
        if grid.tp > 1 and options.optimizer.lower() == "muon":
            raise ConfigError(
                "muon with --tp: it updates whole matrices, which tp splits; use tp=1 or another optimizer"
            )
        if grid.pp > 1:
            if zero.precision == Precision(compute="fp16"):
                raise ConfigError("--pp with --precision fp16: a schedule has no place for a loss scale; use bf16")
            if options.offload is not None:
                raise ConfigError("--pp with --offload: the runtime has no offload in a pipeline yet; leave one out")
            zero = dataclasses.replace(zero, units=_own_units)
        return cls(options, grid, zero)

    def build(self, stage: int = 0) -> nn.Module:
        """The model, or one stage of it, on torch's default device."""
        if self.grid.pp == 1:
            return self.options.build()
        return Part(self._shape, stage, self.grid.pp)

    def sample(self, batch: int) -> Any:
        """The model's input; of a pipeline that of all micro-batches."""
        return self.options.sample(batch * self.options.micro_batches if self.grid.pp > 1 else batch)

    def cut(self, stage: int = 0, mesh: Mesh | None = None) -> Cut:
        """How it is cut, for a rehearsal; `mesh` has the ranks of "tp"."""
        split = partial(self.split, mesh=mesh) if mesh is not None and self.grid.tp > 1 else None
        if self.grid.pp == 1:
            return Cut(tp=self.grid.tp, split=split)
        return Cut(pp=self.grid.pp, stage=stage, received=self._received, loss=loss_of, tied=(TIED,))

    def split(self, model: nn.Module, mesh: Mesh) -> None:
        from onefold.train.run.tensor_parallel import parallelize  # here: it brings the compiler, a second of imports

        parallelize(model, mesh)  # type: ignore[arg-type]

    def _received(self, tokens: Tensor) -> Tensor:
        """Hidden states of these tokens, as the stage before would send them."""
        compute = Precision.of(self.zero.precision).compute
        dtype = compute if isinstance(compute, torch.dtype) else torch.float32
        return torch.zeros(*tokens.shape, self._shape.hidden, dtype=dtype, device=tokens.device)

    @property
    def _shape(self) -> Shape:
        shape = self.options.shape()
        assert shape is not None
        return shape


def _own_units(name: str, module: nn.Module) -> bool:
    """Blocks, and the embedding that two stages hold, are units."""
    return name == "wte" or isinstance(module, Block)
