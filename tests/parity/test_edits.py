"""Random lives of a model: whoever writes parameters, in whatever order, all stages and tiers hold the same values.

A sequence of steps, user writes, loads, saves, evaluations, full_parameters and failed backwards is played by plain
torch with fp32 masters, by stage 0, and by one other way to hold and update the state. What they compute and hold
agrees: with stage 0 bit for bit, with plain torch to rounding.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import MinedLayers

WIDTH, BATCH = 8, 4
ADAM: dict[str, Any] = {
    "lr": 0.05,
    "eps": 0.1,
    "weight_decay": 0.01,
}  # eps: a smooth rule, so that rounding stays small
CLOSE, ROUNDED = 1e-5, 2**-6  # of fp32 values, and of what 16 bits compute from them
STEP, FAIL, EVALUATE, READ, STATE, SAVE = "step", "failed backward", "evaluate", "full_parameters", "full state", "save"
LOAD, LOAD_STATE, SCALE, COPY, WRITE = "load", "load_state_dict", "scale in place", "copy in place", "write inside"
EDITS = (SCALE, COPY, WRITE)
OTHERS = (STEP, FAIL, EVALUATE, READ, STATE, SAVE, LOAD, LOAD_STATE)


class Op(NamedTuple):
    kind: str
    seed: int


class Way(NamedTuple):
    """How a model holds and updates its state."""

    stage: int
    host: bool
    in_backward: bool

    @property
    def sharded(self) -> bool:
        """Parameters may be written inside full_parameters only."""
        return self.stage == 3


WAYS = [Way(stage, host, in_backward) for stage in (1, 2, 3) for host in (False, True) for in_backward in (False, True)]


def built() -> MinedLayers:
    torch.manual_seed(3)
    return MinedLayers(WIDTH, 3)


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * seed + rank))


def edit(param: Tensor, op: Op) -> None:
    """Every element changes its sign, so that each is written, whoever looks at elements or at parameters; but inside
    full_parameters, where elements count, half of them."""
    if op.kind == WRITE:
        param.view(-1)[: param.numel() // 2].mul_(-0.5)
    elif op.kind == COPY:
        drawn = torch.rand(param.shape, generator=torch.Generator().manual_seed(op.seed)) + 0.25
        param.copy_(-param.detach().sign() * drawn.to(param.dtype))
    else:
        param.mul_(-0.5)


def whole_state(like: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) / 3 for name, p in like.named_parameters()}


class Plain:
    """Plain torch on all ranks' batches: fp32 masters, and a rounded copy that computes."""

    def __init__(self, precision: str, ranks: int) -> None:
        self.model, self.ranks = built(), ranks
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAM)
        self.saved: Any = None

    def forward(self, seed: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        copies = {n: p.detach().to(self.dtype).requires_grad_() for n, p in self.model.named_parameters()}
        return functional_call(self.model, copies, (batch(seed, rank).to(self.dtype),)), copies

    def step(self, seed: int) -> None:
        sums: dict[str, Tensor] = {}
        for rank in range(self.ranks):
            output, copies = self.forward(seed, rank)
            output.float().square().sum().backward()
            for name, param in copies.items():
                sums[name] = sums.get(name, 0) + param.grad.float() / self.ranks
        for name, param in self.model.named_parameters():
            param.grad = sums[name].to(self.dtype).float()
        self.optimizer.step()

    @torch.no_grad()
    def play(self, op: Op, rank: int) -> list[Tensor]:
        params = list(self.model.parameters())
        if op.kind == STEP:
            with torch.enable_grad():
                self.step(op.seed)
        elif op.kind in EDITS:
            param = params[op.seed % len(params)]
            rounded = param.to(self.dtype)
            edit(rounded, op)
            some = param.numel() // 2 if op.kind == WRITE else param.numel()
            param.view(-1)[:some] = rounded.view(-1)[:some].float()
        elif op.kind == SAVE:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        elif op.kind == LOAD and self.saved:
            model, optimizer = copy.deepcopy(self.saved)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        elif op.kind == LOAD_STATE:
            self.model.load_state_dict(whole_state(self.model, op.seed))
        elif op.kind == EVALUATE:
            return [self.forward(op.seed, rank)[0].detach()]
        return [param.clone() for param in params] if op.kind == STATE and rank == 0 else []


class Ours:
    def __init__(self, way: Way, precision: str, folder: Path) -> None:
        offload = onefold.Offload(optimizer="host", spare_bytes=1 << 20) if way.host else None
        self.model = onefold.shard(
            built(), stage=way.stage, precision=precision, bucket_bytes=256, offload=offload, units=nn.Linear
        )
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, step_in_backward=way.in_backward, **ADAM)
        self.way, self.folder, self.saves = way, folder / f"{way.stage}-{way.host}-{way.in_backward}", 0

    def backward(self, seed: int, rank: int) -> None:
        self.model(batch(seed, rank)).float().square().sum().backward()

    def fail(self, seed: int, rank: int) -> None:
        self.model.armed = True
        with pytest.raises(ArithmeticError):
            self.backward(seed, rank)
        self.model.armed = False
        self.optimizer.zero_grad()

    def play(self, op: Op, rank: int) -> list[Tensor]:
        params = list(self.model.parameters())
        if op.kind == STEP:
            self.backward(op.seed, rank)
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif op.kind == FAIL:
            self.fail(op.seed, rank)
        elif op.kind == WRITE or (op.kind in EDITS and self.way.sharded):
            with onefold.full_parameters(self.model, write=True), torch.no_grad():
                edit(params[op.seed % len(params)], op)
        elif op.kind in EDITS:
            with torch.no_grad():
                edit(params[op.seed % len(params)], op)
        elif op.kind == SAVE:
            self.saves += 1
            onefold.save(self.folder, self.model, self.optimizer, step=self.saves)
        elif op.kind == LOAD and self.saves:
            onefold.load(self.folder, self.model, self.optimizer)
        elif op.kind == LOAD_STATE:
            self.model.load_state_dict(whole_state(self.model, op.seed))
        elif op.kind == READ:
            with onefold.full_parameters(self.model), torch.no_grad():
                return [param.detach().clone() for param in params]
        elif op.kind == EVALUATE:
            with torch.no_grad():
                return [self.model(batch(op.seed, rank))]
        return list(onefold.full_state_dict(self.model).values()) if op.kind == STATE else []


def lives(way: Way, precision: str, ops: list[Op], folder: str) -> list[str]:
    """On every rank: where a way to hold the state differs from stage 0, or stage 0 from plain torch."""
    onefold.init()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain = Plain(precision, ranks)
    least = Ours(Way(0, host=False, in_backward=False), precision, Path(folder))
    other = Ours(way, precision, Path(folder))
    found = []
    for number, op in enumerate(ops):
        ours, theirs, torchs = (one.play(op, rank) for one in (least, other, plain))
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            found.append(f"{number} {op}: {way} differs from stage 0")
        for a, b in zip(ours, torchs if op.kind != READ else [], strict=op.kind != READ):
            close = ROUNDED if a.dtype is torch.bfloat16 else CLOSE
            if not torch.allclose(a.float(), b.float(), rtol=close, atol=close):
                found.append(f"{number} {op}: stage 0 differs from plain torch by {float((a - b).abs().max()):.2g}")
    return found


def sequences() -> Any:
    kinds = st.sampled_from([*EDITS, *EDITS, STEP, STEP, STEP, *OTHERS])
    return st.lists(st.builds(Op, kinds, st.integers(0, 99)), min_size=4, max_size=14)


def check(ranks: int, precision: str, way: Way, ops: list[Op]) -> None:
    """Each sequence ends with a step and a look at everything, so that nothing that was lost stays unseen."""
    fails_anywhere = [op for op in ops if not (op.kind == FAIL and way.in_backward)]  # else units would be updated
    ops = [*fails_anywhere, Op(STATE, 0), Op(STEP, 1), Op(EVALUATE, 2), Op(STATE, 0)]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(ranks, lives, way, precision, ops, folder)
    assert found == [[]] * ranks


@pytest.mark.parametrize(("ranks", "precision"), thinned([1, 2], ["fp32", "bf16"]))
def test_no_write_is_lost_or_taken_for_another_in_any_order(ranks: int, precision: str, request: Any) -> None:
    soak = request.config.getoption("--soak")
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]

    phases = (Phase.explicit, Phase.generate)  # to shrink a failure of ranks would start new ranks each time

    @settings(
        max_examples=400 if soak else 6, deadline=None, derandomize=not soak, suppress_health_check=quiet,
        phases=phases, database=None,
    )  # fmt: skip
    @example(way=Way(1, host=False, in_backward=True), ops=[Op(SCALE, 0), Op(STEP, 3), Op(COPY, 1), Op(STEP, 4)])
    @example(way=Way(2, host=True, in_backward=False), ops=[Op(STEP, 3), Op(WRITE, 0), Op(SCALE, 0), Op(STEP, 4)])
    @example(way=Way(3, host=True, in_backward=True), ops=[Op(STEP, 3), Op(SAVE, 0), Op(WRITE, 0), Op(LOAD, 0)])
    @given(way=st.sampled_from(WAYS), ops=sequences())
    def play(way: Way, ops: list[Op]) -> None:
        check(ranks, precision, way, ops)

    play()
