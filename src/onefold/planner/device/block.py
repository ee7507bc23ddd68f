"""A GPT's block as torch runs it: forward and backward together with all that lies between its products."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.planner.device.clock import Clock

LENGTH, HEAD = 1024, 64
LONG = ((8192, 1024), (8192, 1600), (16384, 2560), (8192, 4096), (16384, 4096), (4096, 5120))
SUSTAINED_S = 3.0
HEAT_S = 0.2  # seconds of products before each block, so that it is timed at the clock of training
TOKENS, WIDTHS = (4096, 8192, 16384), (1024, 1600, 2048, 2560, 4096, 5120)


class Block(nn.Module):
    """A GPT's block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + down


def _block(clock: Clock, hidden: int, dtype: torch.dtype) -> Block:
    """A block that the device fills: while the host filled it, the device would rest, and then have a higher clock."""
    with clock.device:
        return Block(hidden, hidden // HEAD).to(dtype)


def _bytes(tokens: int, hidden: int, itemsize: int) -> int:
    """What a block takes at most, with its gradients."""
    return (60 * tokens * hidden + 24 * hidden**2) * itemsize


def sustained(clock: Clock) -> dict[str, list[list[float]]]:
    """Blocks again, without a pause, as training has none: a GPU that computes for seconds may be held to its power
    limit and slow down, which short timings would not show. By dtype rows of tokens, hidden size, width of a head,
    length, and seconds of forward and backward together, at the end of SUSTAINED_S; empty on a CPU."""
    if not clock.cuda or clock.quick:
        return {}
    found = []
    for tokens, hidden in LONG:
        if not clock.fits(_bytes(tokens, hidden, 2)):
            continue
        block = _block(clock, hidden, torch.bfloat16)
        shape = (tokens // LENGTH, LENGTH, hidden)
        x = torch.randn(shape, device=clock.device).bfloat16().requires_grad_()
        inputs, grad = (x, *block.parameters()), torch.randn(shape, device=clock.device).bfloat16()

        def step(
            block: Block = block, x: Tensor = x, inputs: tuple[Tensor, ...] = inputs, grad: Tensor = grad
        ) -> tuple[Tensor, ...]:
            return torch.autograd.grad(block(x), inputs, grad)

        began, last = time.perf_counter(), 0.0
        while time.perf_counter() - began < SUSTAINED_S:
            last = clock.mean_s(step, 20)
        found.append([tokens, hidden, HEAD, LENGTH, last])
    return {"bf16": found}


def blocks(clock: Clock) -> dict[str, list[list[float]]]:
    """By dtype rows of tokens, hidden size, width of a head, length, seconds of forward and of backward."""
    name, dtype = ("bf16", torch.bfloat16) if clock.cuda else ("fp32", torch.float32)
    length = LENGTH if clock.cuda and not clock.quick else 32
    sizes = [(tokens, width) for tokens in TOKENS for width in WIDTHS]
    if clock.quick:
        sizes = [(64, 64)]
    elif not clock.cuda:
        sizes = [(32, 256), (256, 512), (1024, 512)]
    found = []
    for tokens, hidden in sizes:
        if clock.fits(_bytes(tokens, hidden, dtype.itemsize)):
            block = _block(clock, hidden, dtype)
            clock.heat(HEAT_S)
            x = torch.randn(tokens // length, length, hidden, device=clock.device).to(dtype).requires_grad_()
            output = block(x)
            inputs, grad = (x, *block.parameters()), torch.randn_like(output)

            def backward(
                output: Tensor = output, inputs: tuple[Tensor, ...] = inputs, grad: Tensor = grad
            ) -> tuple[Tensor, ...]:
                return torch.autograd.grad(output, inputs, grad, retain_graph=True)

            back = clock.seconds(backward)
            with torch.no_grad():
                forward = clock.seconds(lambda block=block, x=x: block(x))  # type: ignore[misc]
            found.append([tokens, hidden, HEAD, length, forward, back])
    return {name: found}
