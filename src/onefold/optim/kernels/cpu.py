"""The fused update kernel for CPUs: calls cpu.c, as cuda.py calls the CUDA kernel.

For Adam, AdamW and SGD where 16 bits compute. It gives the bits that torch's class gives on an fp32 master (cpu.c
says how; on x86 torch's last bits may differ), and all ranks use it or none. ctypes releases the GIL while it runs, so
a worker thread can update while another thread trains.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.spans import named_span
from onefold.optim.kernels.compiled import compiled
from onefold.optim.kernels.rule import Rule, knows
from onefold.optim.kernels.small import SmallStep

LOG = logging.getLogger("onefold")
UPDATE = "onefold::update"  # what profilers call the kernel
SOURCE = Path(__file__).with_name("cpu.c")
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
ADAM, ADAM_FUSED, SGD, MOMENTUM, NESTEROV = range(5)
SPLIT, WIDE_BF16, WIDE_FP16, OWN = range(4)
SMALL_FORMS = {torch.bfloat16: 0, torch.uint8: 1}


class _Step(ctypes.Structure):
    """The struct of this name in cpu.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("grad", "master", "rule", "edits")),
        *((name, ctypes.c_float) for name in ("factor", "decay", "shrink", "size")),
        *((name, ctypes.c_float) for name in ("beta1", "rest1", "beta2", "rest2", "root", "eps")),
    )


class _Slice(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("grad", "copy", "master", "first", "second"))


class _Coding(ctypes.Structure):
    _fields_ = (("form", ctypes.c_int32), ("key", ctypes.c_uint32 * 2), ("start", ctypes.c_uint32))


class _Coded(ctypes.Structure):
    _fields_ = (("moment", ctypes.c_void_p * 2), ("scale", ctypes.c_void_p * 2))


def fits(cls: type[torch.optim.Optimizer], group: dict[str, Any], device: torch.device) -> bool:
    """Whether the kernel is available and supports this class with these settings on this device."""
    return device.type == "cpu" and knows(cls, group) and available()


def available() -> bool:
    """Whether the kernel is compiled and loaded. The first call may compile it."""
    return _kernel() is not None


class Written(NamedTuple):
    """Where an update writes, if not where it reads: the vectors of the same names of a step and its Rule."""

    copy: Tensor
    master: Tensor
    first: Tensor | None
    second: Tensor | None


def update(
    rule: Rule,
    grad: Tensor,
    copy: Tensor,
    master: Tensor,
    factor: float,
    threads: int,
    *,
    edits: bool = False,
    to: Written | None = None,
) -> None:
    """Updates some elements by a rule. `copy` are the 16-bit parameters; `master` is fp32, or int16 remainders of a
    bf16 `copy`. The gradient, fp32 or of the dtype of `copy`, is multiplied by `factor`. With `edits` an element of
    `copy` to which its fp32 master does not round was written by a user, and replaces the master first. With `to`
    everything stays as it is, and what would be written is written there."""
    kernel = _kernel()
    assert kernel is not None and threads >= 1
    step = _step(rule, grad, copy, master, factor, edits, _number(rule), rule.root)
    read = [grad, *(one for one in (copy, master, rule.first, rule.second) if one is not None)]
    written = [grad, *(one for one in to if one is not None)] if to is not None else read
    assert all(v.device.type == "cpu" and v.is_contiguous() and v.numel() == grad.numel() for v in read + written)
    assert all(moment.dtype is torch.float32 for moment in read[3:])
    assert [one.dtype for one in read] == [one.dtype for one in written]
    slices = [_Slice(*(vector.data_ptr() for vector in vectors)) for vectors in (read, written)]
    with named_span(UPDATE):
        unknown = kernel.update(ctypes.byref(step), *map(ctypes.byref, slices), grad.numel(), threads)
    assert not unknown, f"a gradient in {grad.dtype} beside a copy in {copy.dtype}"


def update_small(
    small: SmallStep, grad: Tensor, copy: Tensor | None, master: Tensor, factor: float, threads: int, *, edits: bool
) -> None:
    """As `update`, with moments in a small form; `copy` is None where fp32 parameters are their own master. The first
    element is the first of a block."""
    kernel, rule = _kernel(), small.rule
    assert kernel is not None and threads >= 1
    number = ADAM if rule.adam else NESTEROV if rule.nesterov else MOMENTUM
    step = _step(rule, grad, copy, master, factor, edits, number, 1 / rule.root)
    vectors = [grad, master, *([] if copy is None else [copy]), *(moment.codes for moment in small.moments)]
    assert all(v.device.type == "cpu" and v.is_contiguous() and v.numel() == grad.numel() for v in vectors)
    coding = _Coding(SMALL_FORMS[small.moments[0].codes.dtype], small.keys, small.start % (1 << 32))
    pointers = _Slice(grad.data_ptr(), (master if copy is None else copy).data_ptr(), master.data_ptr())
    codes = [moment.codes.data_ptr() for moment in small.moments]
    scales = [moment.scales.data_ptr() for moment in small.moments if moment.scales is not None]
    coded = _Coded((ctypes.c_void_p * 2)(*codes), (ctypes.c_void_p * 2)(*scales))
    given = ctypes.byref(step), ctypes.byref(coding), ctypes.byref(pointers), ctypes.byref(coded)
    with named_span(UPDATE):
        unknown = kernel.update_small(*given, grad.numel(), threads)
    assert not unknown, rule


def _step(
    rule: Rule, grad: Tensor, copy: Tensor | None, master: Tensor, factor: float, edits: bool, number: int, root: float
) -> _Step:
    split, half = master.dtype is torch.int16, copy is not None and copy.dtype is torch.float16
    assert split or master.dtype is torch.float32
    assert copy is None or copy.dtype is torch.bfloat16 or (half and not split)
    kind = OWN if copy is None else SPLIT if split else WIDE_FP16 if half else WIDE_BF16
    return _Step(
        DTYPES[grad.dtype], kind, number, edits, factor, 0.0 if rule.decoupled else rule.decay, rule.shrink, rule.size,
        rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, root, rule.eps,
    )  # fmt: skip


def _number(rule: Rule) -> int:
    if rule.adam:
        return ADAM_FUSED if rule.fused else ADAM
    return SGD if rule.first is None else NESTEROV if rule.nesterov else MOMENTUM


class _Kernels(NamedTuple):
    update: Any
    update_small: Any


@cache
def _kernel() -> _Kernels | None:
    """The functions in cpu.c; None if it cannot be compiled, and the log says why."""
    library, failures = compiled(SOURCE)
    if library is None:
        LOG.info(
            "the CPU's update kernel could not be compiled (%s); torch updates 16-bit parameters instead, to the same "
            "bits on ARM and near ones on x86, in several passes over memory, which take 2 to 16 times as long",
            "; ".join(failures),
        )
        return None
    made = _Kernels(library.onefold_update, library.onefold_update_small)
    step, length = (ctypes.POINTER(_Step), ctypes.POINTER(_Slice)), (ctypes.c_int64, ctypes.c_int32)
    made.update.argtypes = (*step, step[1], *length)
    made.update_small.argtypes = (step[0], ctypes.POINTER(_Coding), step[1], ctypes.POINTER(_Coded), *length)
    made.update.restype = made.update_small.restype = ctypes.c_int
    return made
