"""What moves bytes: optimizer updates on the device and on the host, copies between both, a disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.cost.rates import small_updates
from onefold.optim.kernels import cpu, cuda, cuda_small
from onefold.optim.kernels.rule import next_step
from onefold.optim.kernels.small import next_small_step
from onefold.optim.kernels.threads import ranks_here, threads_here
from onefold.planner.device.clock import Clock

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
FP32 = 28  # bytes per parameter: of what is read and written, with the gradient
SMALL = {"bf16": 18, "8bit": 14}  # those with a split master and moments in this form
COPIED_BYTES = 256 << 20
FILE_BYTES = 1 << 30


def updates(clock: Clock) -> dict[str, list[list[float]]]:
    """AdamW on the device and on the host: rows of parameters, bytes read and written per parameter, seconds. 16-bit
    parameters with an fp32 master (28 bytes) and with a split one (26) are updated by our kernels, fp32 ones (28) by
    torch's fused class; those with a split master and moments in bf16 (18 bytes) or 8 bits (14) by our kernels."""
    numel = 1 << 12 if clock.quick else 1 << 27 if clock.cuda else 1 << 23
    host = Clock(torch.device("cpu"), clock.least_s, clock.quick)
    on_host = 1 << 12 if clock.quick else 1 << 26 if clock.cuda else 1 << 23
    found = {"device": _updates(clock, numel), "host": _updates(host, on_host)}
    for tier, its_clock, count in (("device", clock, numel), ("host", host, on_host)):
        if cuda_small.available(its_clock.device) if its_clock.cuda else cpu.available():
            found |= {small_updates(tier, form): [_small_update(its_clock, count, form)] for form in SMALL}
    return found


def _updates(clock: Clock, numel: int) -> list[list[float]]:
    device, rows = clock.device, []
    if not clock.fits(32 * numel):
        numel = 1 << 20
    kernel = cuda.fits(torch.optim.AdamW, ADAMW, device) or cpu.fits(torch.optim.AdamW, ADAMW, device)
    grad = torch.full((numel,), 1e-3, device=device, dtype=torch.bfloat16)
    copy = torch.full((numel,), 0.02, device=device, dtype=torch.bfloat16)
    for master in (torch.float32, torch.int16) if kernel else ():
        own, state = torch.zeros(numel, device=device, dtype=master), dict[str, Any]()

        def step(own: Tensor = own, state: dict[str, Any] = state) -> None:
            rule = next_step(torch.optim.AdamW, ADAMW, state, numel, device)
            if clock.cuda:
                cuda.update(rule, grad, copy, own, 1.0)
            else:
                cpu.update(rule, grad, copy, own, 1.0, threads_here() * ranks_here())

        rows.append([numel, 28 if master is torch.float32 else 26, clock.seconds(step)])
        del own, state
    param = nn.Parameter(torch.full((numel,), 0.02, device=device))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW([param], fused=True, **ADAMW)
    rows.append([numel, FP32, clock.seconds(optimizer.step)])
    return rows


def _small_update(clock: Clock, numel: int, form: str) -> list[float]:
    device = clock.device
    if not clock.fits(16 * numel):
        numel = 1 << 20
    grad = torch.full((numel,), 1e-3, device=device, dtype=torch.bfloat16)
    copy = torch.full((numel,), 0.02, device=device, dtype=torch.bfloat16)
    master, state = torch.zeros(numel, device=device, dtype=torch.int16), dict[str, Any]()

    def step() -> None:
        small = next_small_step(torch.optim.AdamW, ADAMW, state, numel, device, form)
        if clock.cuda:
            cuda_small.update(small, grad, copy, master, 1.0)
        else:
            cpu.update_small(small, grad, copy, master, 1.0, threads_here() * ranks_here(), edits=False)

    return [numel, SMALL[form], clock.seconds(step)]


def copies(clock: Clock) -> dict[str, float]:
    """Bytes per second between pinned host memory and the device: up, down, and each way while both run."""
    if not clock.cuda:
        return {}
    nbytes = 1 << 20 if clock.quick else COPIED_BYTES
    hosts = [torch.ones(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    targets = [torch.ones(nbytes, dtype=torch.uint8, device=clock.device) for _ in range(2)]
    other = torch.cuda.Stream(clock.device)

    def both() -> None:
        current = torch.cuda.current_stream(clock.device)
        other.wait_stream(current)
        targets[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(other):
            hosts[1].copy_(targets[1], non_blocking=True)
        current.wait_stream(other)

    return {
        "up": nbytes / clock.seconds(lambda: targets[0].copy_(hosts[0], non_blocking=True)),
        "down": nbytes / clock.seconds(lambda: hosts[1].copy_(targets[1], non_blocking=True)),
        "both": nbytes / clock.seconds(both),
    }


def disk(folder: Path, nbytes: int = FILE_BYTES) -> dict[str, float]:
    """Bytes per second written to a file in this folder, until they are on the disk, and read from it."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(max(1, nbytes >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory is read
        file.seek(0)
        began = time.perf_counter()
        while file.read(1 << 20):
            pass
        read = time.perf_counter() - began
    return {"write": nbytes / written, "read": nbytes / read}
