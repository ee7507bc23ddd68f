"""One update of some elements of a unit whose moments are in a small form: by a kernel, or in operations of torch."""

from __future__ import annotations

from torch import Tensor

from onefold.cost.layout import Span
from onefold.optim.kernels import cpu, cuda_small, small
from onefold.state.master import StoredMaster
from onefold.state.unit import Unit


def update_small(
    unit: Unit,
    span: Span,
    step: small.SmallStep,
    grad: Tensor,
    factor: float | Tensor,
    bad: Tensor | None,
    threads: int,
) -> None:
    """Updates these elements of a unit; `threads` is 0 where the CPU's kernel may not be used. All ways give the same
    bits."""
    master, device = unit.master, unit.pool.device
    on_cpu = device.type == "cpu"
    if not (threads and cpu.available() if on_cpu else cuda_small.available(device)):
        if unit.may_be_edited:
            master.take_changed(span)
        value = master.begin_update(span)
        small.update(step, grad, value, factor, bad)
        master.end_update(span, value)
        return
    if isinstance(master, StoredMaster):
        copy, stored = master.copy_and_stored(span)
    else:
        copy, stored = None, master.begin_update(span)
    if on_cpu:
        cpu.update_small(step, grad, copy, stored, float(factor), threads, edits=unit.may_be_edited)
    else:
        cuda_small.update(step, grad, copy, stored, factor, bad, edits=unit.may_be_edited)
