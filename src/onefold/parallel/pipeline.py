"""One stage of torch's pipeline schedules, a part of a model whose state is sharded among the ranks of that stage.

torch's schedules (GPipe, 1F1B) run forwards and backwards of micro-batches in an order of their own. ZeRO needs two
things of them: which backward is the last of a step, and that the mean over micro-batches is taken before gradients are
reduced, not by dividing .grad afterwards, when the gradients have left it.

1 The last stage divides each loss by the number of micro-batches; so every gradient of every stage is divided.
2 All backwards but the last run inside accumulate().
3 At stage 3, units may stay unsharded across the micro-batches of a step, within a budget of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B

from onefold.comm.mesh import end_ranks
from onefold.errors import ConfigError, StateError
from onefold.parallel.tied import Tied
from onefold.runtime.accumulating import check_reduce
from onefold.runtime.engine import Engine, engine_of

AXIS = "pp"


class PipelineStage(TorchStage):
    """This rank's part of a model, as one stage of torch's pipeline schedules over the mesh axis "pp".

    `part` has been sharded before. Make the schedule with scale_grads=False: with `mean` the stage itself divides by
    the number of micro-batches. `reduce` is that of `accumulate`. `keep_bytes`, at stage 3: this many bytes of
    parameters stay unsharded from the first forward of a step to its last backward, instead of being all-gathered for
    each micro-batch. `tied`: names of parameters that the first and the last stage both hold, each a unit of its own.

    >>> import torch, onefold
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.pipelining import ScheduleGPipe
    >>> onefold.init()
    >>> part = onefold.shard(torch.nn.Linear(8, 8))
    >>> stage = onefold.PipelineStage(part, init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))
    >>> schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss(), scale_grads=False)
    >>> _ = schedule.step(torch.ones(4, 8), target=torch.ones(4, 8))
    """

    def __init__(
        self,
        part: nn.Module,
        mesh: DeviceMesh,
        *,
        mean: bool = True,
        reduce: str | None = None,
        keep_bytes: int = 0,
        tied: Sequence[str] = (),
        index: int | None = None,
        stages: int | None = None,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
    ) -> None:
        self._engine, self._mean, self._reduce, self._keep_bytes = engine_of(part), mean, reduce, keep_bytes
        check_reduce(reduce)
        _check_mesh(mesh)
        axis = mesh[AXIS]
        several = stages is not None and stages != axis.size()
        _check(self._engine, keep_bytes, index, stages, tied=bool(tied), several=several)
        at = axis.get_local_rank() if index is None else index
        if several:
            self._engine.share_rank()
        super().__init__(
            part,
            at,
            axis.size() if stages is None else stages,
            self._engine.device,
            input_args=_with_gradients(input_args, first=at == 0),
            output_args=_with_gradients(output_args),
            group=axis.get_group(),
        )
        if tied and self.is_first is not self.is_last:
            Tied(self._engine, end_ranks(mesh, AXIS), tied)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._learning_shapes():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._learning_shapes():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _learning_shapes(self) -> Iterator[None]:
        """Around torch's run on uninitialised inputs, by which it learns shapes: buffers (BatchNorm's statistics) are
        restored, and block inputs are not compared between ranks."""
        store = self._engine.checkpoints
        before = [buffer.clone() for buffer in self.submod.buffers()]
        if store:
            store.blind = True
        try:
            yield
        finally:
            if store:
                store.blind = False
            with torch.no_grad():
                for buffer, value in zip(self.submod.buffers(), before, strict=True):
                    buffer.data.copy_(value)  # .data: no new version, since the graph has saved it

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0 and self.has_backward:
            self._engine.keep_across(self._keep_bytes)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            raise ConfigError(
                "this schedule computes gradients of inputs and of weights separately, without the hooks that reduce "
                "them; use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        if loss is not None and self._mean:
            loss = loss / self.chunks
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        if last_backward:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=True)
            self._engine.keep_across(0)
            return result
        with self._engine.accumulate(self._reduce):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: Sequence[Any]) -> Sequence[Any]:
        """Counts what is about to be sent to a neighbouring stage."""
        for one in operations:
            self._engine.comm.meter.count("pipeline", "send", one.tensor.nbytes)
        return operations

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by torch when the backwards of all micro-batches have ended, on this stage and on the others."""
        self.scale_grads(grad_scale_factor)
        self._engine.end_schedule()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Called by torch to divide .grad by the number of micro-batches; raises, as gradients were reduced before."""
        if grad_scale_factor != 1:
            raise StateError(
                "the schedule would divide .grad by the number of micro-batches, after gradients were reduced; make it "
                "with scale_grads=False: the stage itself takes the mean over micro-batches (mean=False for sums)"
            )


class Schedule:
    """The micro-batches of a step in the order of 1F1B, on one rank of a pipeline. The sample is (inputs, targets)."""

    def __init__(
        self, part: nn.Module, mesh: DeviceMesh, micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor],
        tied: Sequence[str],
    ) -> None:  # fmt: skip
        self._stage = PipelineStage(part, mesh, tied=tied)
        self._schedule = Schedule1F1B(self._stage, micro_batches, loss_fn=loss, scale_grads=False)

    def __call__(self, _: nn.Module, sample: Any, backward: Any) -> None:
        """Forwards and backwards of a step; torch's schedule runs the backwards itself, not by `backward`."""
        inputs, targets = sample
        last, losses = self._stage.is_last, list[Tensor]()
        self._schedule.step(
            *[inputs] * self._stage.is_first, target=targets if last else None, losses=losses if last else None,
            return_outputs=False,
        )  # fmt: skip


def _with_gradients(examples: Any, *, first: bool = False) -> Any:
    """Example tensors that require a gradient, as tensors between stages do; the first stage's inputs stay as given."""
    if examples is None or first:
        return examples
    rows = (examples,) if isinstance(examples, Tensor) else tuple(examples)
    return tuple(row.detach().requires_grad_() if row.is_floating_point() else row for row in rows)


def _check_mesh(mesh: Any) -> None:
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if AXIS not in (names or ()):
        raise ConfigError(
            f"a pipeline needs a mesh with an axis named {AXIS!r}, found {names or mesh!r}; make one with "
            f"onefold.mesh(pp=2, shard=-1)"
        )


def _check(
    engine: Engine, keep_bytes: Any, index: int | None, stages: int | None, *, tied: bool, several: bool
) -> None:
    """Raises for settings that no schedule supports."""
    if (index is None) != (stages is None):
        raise ConfigError("give both index and stages, where a rank holds several stages, or neither")
    if type(keep_bytes) is not int or keep_bytes < 0:
        raise ConfigError(f"keep_bytes={keep_bytes!r} is not a number of bytes; 0 keeps nothing")
    if engine.resolved.precision.compute is torch.float16:
        raise ConfigError(
            "a schedule calls backward itself, without the loss scale that fp16 needs; shard with precision='bf16'"
        )
    if several and tied:
        raise ConfigError(
            "tied= needs one stage per rank: where a rank holds several, the ends of the pipeline wait for each other; "
            "use Schedule1F1B, or untie the parameters"
        )
