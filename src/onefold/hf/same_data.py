"""Ranks that share each sequence read the same data, and count as one of accelerate's processes.

Data loaders deal batches to these processes, and what is gathered for metrics has the rows of each once. On a mesh
without the axis "sequence" every rank is a process of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import accelerate
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import RandomSampler

from onefold import ConfigError, Zero
from onefold.comm.mesh import Mesh

READING = ("replica", "shard")  # axes along which ranks read different data


class Readers(NamedTuple):
    """The processes that read different data, and which of them this rank is."""

    process: int
    firsts: tuple[int, ...]  # a rank of each: the first of those that share its data
    first: bool  # this rank is such a one


def readers_of(mesh: Mesh | None) -> Readers | None:
    """None if the mesh cuts no sequences."""
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    if mesh is None or "sequence" not in names:
        return None
    axes = [names.index(name) for name in READING if name in names]
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    table = mesh.mesh.permute(*axes, *others).reshape(-1, *(mesh.size(axis) for axis in others)).flatten(1)
    process, place = (table == mesh.get_rank()).nonzero()[0].tolist()
    return Readers(process, tuple(table[:, 0].tolist()), place == 0)


class SameDataAccelerator(accelerate.Accelerator):
    """accelerate's Accelerator, in which ranks that share each sequence are one process."""

    readers: Readers | None = None

    def __init__(self, *args: Any, zero: Zero | None = None, **kwargs: Any) -> None:
        self.readers = readers_of(zero.mesh if zero is not None else None)
        super().__init__(*args, **kwargs)
        if self.readers is not None and self.dataloader_config.dispatch_batches:
            raise ConfigError(
                'dispatch_batches=True lets rank 0 read for all ranks, and the mesh cuts sequences ("sequence") over '
                "ranks that read the same batches; leave it out: each rank reads its own"
            )

    @property
    def num_processes(self) -> int:
        """How many ranks read data of their own."""
        return len(self.readers.firsts) if self.readers is not None else int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """The place of this rank among ranks that read data of their own: the same for ranks that share sequences."""
        return self.readers.process if self.readers is not None else int(self.state.process_index)

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches if self.readers is None else False

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """A data loader that gives each process other batches, and ranks that share sequences the same ones."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.readers is not None and prepared.synchronized_generator is None:
            sampler = prepared.get_sampler()
            if type(sampler) is RandomSampler:  # of one process, where accelerate sees no need for it
                sampler.generator = torch.Generator() if sampler.generator is None else sampler.generator
                prepared.synchronized_generator, prepared.rng_types = sampler.generator, ["generator"]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        made = super().prepare_scheduler(scheduler)
        if self.readers is None or type(made) is not AcceleratedScheduler or made.split_batches:
            return made
        self._schedulers[-1] = ReadersScheduler(made, self.num_processes)
        return self._schedulers[-1]

    def gather(self, tensor: Any) -> Any:
        """The tensors of all processes, one behind the other: those of ranks that share sequences once. Collective."""
        found, readers = super().gather(tensor), self.readers
        if readers is None:
            return found
        ranks, firsts = int(self.state.num_processes), list(readers.firsts)
        return recursively_apply(lambda one: one.unflatten(0, (ranks, -1))[firsts].flatten(0, 1), found)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's, with what ranks that share sequences have once. Collective."""
        objects = use_gather_object or not _all_tensors(input_data)
        mine = input_data if self.readers is None or self.readers.first or not objects else []
        return super().gather_for_metrics(mine, objects)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over processes: what ranks that share sequences have counts once. Collective."""
        if self.readers is not None and not self.readers.first and reduction == "sum":
            tensor = recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)


class ReadersScheduler(AcceleratedScheduler):
    """accelerate steps a scheduler once for each process in every step: here once for each that reads data."""

    def __init__(self, made: AcceleratedScheduler, readers: int) -> None:
        super().__init__(made.scheduler, made.optimizers, made.step_with_optimizer, split_batches=True)
        self._readers = readers

    def step(self, *args: Any, **kwargs: Any) -> None:
        last = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._readers if self.step_with_optimizer and self.gradient_state.sync_gradients else 1):
            if last is None or self.scheduler._step_count <= last:
                super().step(*args, **kwargs)


def _all_tensors(data: Any) -> bool:
    def same(tensor: Tensor) -> Tensor:
        return tensor

    try:
        recursively_apply(same, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
