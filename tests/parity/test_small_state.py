"""Optimizer state in bf16 and 8 bits: the same bits at every stage, number of ranks and tier, the bytes that plans say,
and a training that ends where fp32's ends."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import device, run_ranks, run_ranks_raises
from tests.models.transformers import GPT, GPT_VOCAB
from tests.parity.training import Run, compare_stages

SPLIT = onefold.Precision(compute="bf16", master="split")
WIDE = onefold.Precision(compute="bf16", master="fp32")
ADAMW: tuple[Any, dict[str, Any]] = torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM: tuple[Any, dict[str, Any]] = torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}
STEPS = 4


class Case(NamedTuple):
    state: str
    precision: Any
    optimizer: tuple[Any, dict[str, Any]] = ADAMW


CASES = {
    "8bit": Case("8bit", SPLIT),
    "8bit, momentum": Case("8bit", "fp32", MOMENTUM),
    "bf16": Case("bf16", WIDE),
}
PLACES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "offload": "host"},
    {"stage": 3, "offload": onefold.Offload(optimizer="host", parameters="host")},
    {"stage": 3, "step_in_backward": True},
    {"stage": 3, "offload": "host", "step_in_backward": True},
]


def exact_gradients(model: nn.Module, step: int) -> Tensor:
    """A loss whose gradients are the same however many ranks compute it: multiples of 3 times powers of two, in 16 bits
    too. The same on every rank."""
    generator = torch.Generator().manual_seed(step)
    rows = 3.0 * torch.randint(-40, 41, (77,), generator=generator)
    columns = 2.0 ** torch.randint(-6, 7, (100,), generator=generator)
    return (model(columns.to(device())).float() * rows.to(device())).sum()


def trained(case: Case, *, stage: int, offload: Any = None, step_in_backward: bool = False) -> str:
    """On every rank: the digest of the masters after a few steps. Shards cut the matrix anywhere."""
    torch.manual_seed(0)
    cls, kwargs = case.optimizer
    model = nn.Linear(100, 77).to(device())
    onefold.shard(model, stage=stage, precision=case.precision, offload=offload)
    optimizer = onefold.Optimizer(model, cls, state=case.state, step_in_backward=step_in_backward, **kwargs)
    for step in range(STEPS):
        exact_gradients(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for value in onefold.full_state_dict(model, every_rank=True).values():
        digest.update(value.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def everywhere(places: list[dict[str, Any]]) -> dict[str, list[str]]:
    onefold.init()
    return {name: [trained(case, **place) for place in places] for name, case in CASES.items()}


def test_every_stage_number_of_ranks_and_tier_gives_the_same_bits() -> None:
    [one] = run_ranks(1, everywhere, PLACES[:1])
    assert len({digests[0] for digests in one.values()}) == len(CASES), "the forms do not differ"
    for ranks, places in ((2, PLACES), (3, PLACES[:4])):
        for answer in run_ranks(ranks, everywhere, places):
            for name, digests in answer.items():
                wrong = [place for place, digest in zip(places, digests, strict=True) if [digest] != one[name]]
                assert wrong == [], (ranks, name)


@pytest.mark.parametrize(("ranks", "run"), [
    (2, Run(optimizer="adamw-8bit", grouped=True, clip=0.05)),
    (3, Run(model="skipping", optimizer="adamw-8bit")),
    (2, Run(model="skipping", optimizer="adamw-bf16", fields=(("precision", "fp16"),))),
])  # fmt: skip
def test_stages_agree_for_groups_clipping_unused_parameters_and_overflow(ranks: int, run: Run) -> None:
    verdicts = run_ranks(ranks, compare_stages, run, (1, 2, 3))
    assert [verdict.differences for verdict in verdicts] == [[]] * ranks
    assert len({verdict.digest for verdict in verdicts}) == 1


# -- bytes -----------------------------------------------------------------------------------------------------------


def measured(state: str, precision: Any, stage: int, offload: Any) -> tuple[int, int, int, str]:
    """Bytes of states between backward and zero_grad, those of the optimizer as planned and measured, on any tier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 90)).to(device())
    onefold.shard(model, stage=stage, precision=precision, offload=offload)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, state=state)  # type: ignore[arg-type]
    model(torch.ones(2, 256)).float().sum().backward()
    optimizer.step()
    now = onefold.memory(model)
    away = [row for row in now.elsewhere if row.state == "optimizer"]
    plan = (now.optimizer.planned or 0) + sum(row.planned for row in away)
    got = now.optimizer.measured + sum(row.measured for row in away)
    return now.states, plan, got, onefold.placement(model).rows[0].optimizer


def bytes_of(cases: list[tuple[str, Any, int, Any]]) -> list[tuple[int, int, int, str]]:
    onefold.init()
    return [measured(*case) for case in cases]


def test_planned_bytes_are_measured_ones_and_a_parameter_takes_10_and_8() -> None:
    numel = 256 * 512 + 512 * 90 + 90
    forms = ("fp32", "bf16", "8bit")
    alone = run_ranks(1, bytes_of, [(state, SPLIT, 0, None) for state in forms])[0]
    per_parameter = [states / numel for states, *_ in alone]
    assert per_parameter == pytest.approx([14.0, 10.0, 8.0], rel=0.006)  # padding, and one scale for 64 elements
    cases = [
        (s, p, stage, o) for s in forms for p in ("fp32", SPLIT) for stage, o in ((1, None), (3, None), (2, "host"))
    ]
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 90))
    for rows in run_ranks(2, bytes_of, cases):
        for (state, _, _, offload), (_, planned, found, placed) in zip(cases, rows, strict=True):
            assert planned == found, (state, offload)
            assert placed.endswith({"fp32": "sharded" if offload is None else "host"}.get(state, f", {state}"))
    first = run_ranks(2, bytes_of, [(state, SPLIT, stage, None) for state in forms for stage in range(4)])[0]
    plans = [
        row.states_bytes
        for state in forms
        for row in onefold.plan(
            model, torch.ones(2, 256), ranks=2, hardware="laptop", precision=SPLIT, optimizer_state=state
        ).stages
    ]
    assert [states for states, *_ in first] == plans


# -- quality ---------------------------------------------------------------------------------------------------------


def learned(states: list[str], steps: int) -> list[float]:
    """The mean loss of the last steps of a tiny GPT that learns which token follows which."""
    onefold.init()
    found = []
    follows = torch.randperm(GPT_VOCAB, generator=torch.Generator().manual_seed(1))
    for state in states:
        torch.manual_seed(0)
        model = onefold.shard(GPT(layers=1).to(device()), stage=2, precision=SPLIT)
        cls, kwargs = torch.optim.AdamW, {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
        optimizer = onefold.Optimizer(model, cls, state=state, **kwargs)  # type: ignore[arg-type]
        losses = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            row = [torch.randint(0, GPT_VOCAB, (8,), generator=generator)]
            for _ in range(8):
                row.append(follows[row[-1]])
            tokens = torch.stack(row, 1).to(device())
            noise = torch.rand(8, 8, generator=generator).to(device()) < 0.1
            targets = torch.where(noise, tokens[:, :1], tokens[:, 1:])
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found += [losses[0], sum(losses[-25:]) / 25]
    return found


def test_a_training_ends_where_fp32_ends() -> None:
    start, wide, _, bf16, _, small = run_ranks(1, learned, ["fp32", "bf16", "8bit"], 120)[0]
    assert wide < 0.4 * start, "nothing was learnt"
    assert abs(bf16 - wide) < 0.02 * wide, (wide, bf16)
    assert abs(small - wide) < 0.05 * wide, (wide, small)


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(what: str, folder: str) -> None:
    onefold.init()
    model = nn.Linear(8, 8).to(device())
    offload = onefold.Offload(optimizer="disk", path=folder) if what == "disk" else None
    model = model.double() if what == "double" else model
    onefold.shard(model, stage=2, offload=offload)
    makers: dict[str, Any] = {
        "adagrad": lambda: onefold.Optimizer(model, torch.optim.Adagrad, state="8bit"),
        "amsgrad": lambda: onefold.Optimizer(model, torch.optim.AdamW, state="bf16", amsgrad=True),
        "muon": lambda: onefold.Optimizer(model, torch.optim.Muon, state="8bit"),
        "unknown": lambda: onefold.Optimizer(model, torch.optim.AdamW, state="4bit"),
        "seed": lambda: onefold.Optimizer(model, torch.optim.AdamW, state="8bit", state_seed=-1),
        "ranks": lambda: onefold.Optimizer(
            model, torch.optim.AdamW, state="8bit", state_seed=engine_of(model).comm.rank
        ),
    }
    makers.get(what, lambda: onefold.Optimizer(model, torch.optim.AdamW, state="8bit"))()


@pytest.mark.parametrize(("what", "error", "said"), [
    ("adagrad", "ConfigError", "state='8bit': Adagrad has no such form"),
    ("amsgrad", "ConfigError", "state='bf16': AdamW has no such form"),
    ("muon", "ConfigError", "state='8bit': Muon has no such form"),
    ("unknown", "ConfigError", "state='4bit' is unknown; use one of 'fp32', 'bf16', '8bit'"),
    ("seed", "ConfigError", "state_seed=-1"),
    ("disk", "ConfigError", "is on disk; use Offload(optimizer='host')"),
    ("double", "ConfigError", "torch.float64"),
    ("ranks", "MismatchError", "state_seed 1"),
])  # fmt: skip
def test_what_has_no_small_form_is_refused_on_every_rank(what: str, error: str, said: str, tmp_path: Any) -> None:
    for failure in run_ranks_raises(2, refused, what, str(tmp_path)):
        assert failure.type_name == error and said in failure.message, failure
