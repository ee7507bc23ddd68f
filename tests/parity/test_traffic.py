"""Each step sends 2Ψ(N-1)/N elements, at stage 3 up to 3Ψ(N-1)/N, to the byte: expectations come from sizes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import GPT_DIM, MODELS, Case, TwoWidths, vector_loss
from tests.parity.training import OPTIMIZERS, Run, batch_for

RANKS = (1, 2, 3, 4)
STAGES = (0, 1, 2)
GATHER = {0: "gather-gradient", 1: "gather-updated", 2: "gather-updated"}
SAID_BYTES = 17  # of what ranks must do alike, and of one that takes more memory, beside the flags
MAX_ROUNDS = {1: 0, 2: 1, 3: 2, 4: 2}  # in which flags are sent: ceil(log2 N)
VECTOR = 64  # elements: parameters and shards start on a multiple of it


CASES = {**MODELS, "mixed": Case(lambda: TwoWidths(GPT_DIM), vector_loss)}


def started(run: Run, case: Case) -> tuple[nn.Module, Callable[[], None]]:
    """On a rank: a sharded model, and a function that trains it for one step."""
    onefold.init()
    torch.manual_seed(1234)
    model = onefold.shard(case.build(), stage=run.stage, bucket_bytes=run.bucket_bytes, **dict(run.fields))
    cls, kwargs = OPTIMIZERS[run.optimizer]
    optimizer = onefold.Optimizer(model, cls, **kwargs)
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        for micro in range(run.micro):
            last = micro == run.micro - 1
            with nullcontext() if last else onefold.accumulate(model, reduce=run.reduce):
                case.loss(model, batch_for(number, micro, dist.get_rank()), number).backward()
        if run.clip is not None:
            optimizer.clip_grad_norm(run.clip)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


class Seen(NamedTuple):
    """What one rank saw. A unit is the sizes of its parameters, in elements, and the bytes of one element."""

    psi_bytes: int  # of all trained parameters
    units: list[tuple[list[int], int]]
    steps: list[onefold.TrafficReport]
    text: str


def watch(run: Run, steps: int = 3) -> Seen:
    model, step = started(run, CASES[run.model])
    reports = []
    for _ in range(steps):
        step()
        reports.append(onefold.traffic(model))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    units = [[trained.pop(slot.name) for slot in unit.layout.slots] for unit in engine_of(model).units]
    assert not trained, f"in no unit: {list(trained)}"
    return Seen(
        psi_bytes=sum(param.nbytes for unit in units for param in unit),
        units=[([param.numel() for param in unit], unit[0].itemsize) for unit in units],
        steps=reports,
        text=str(onefold.traffic(model)),
    )


def up(numel: int, to: int) -> int:
    return (numel + to - 1) // to * to


def padded_bytes(units: Iterable[tuple[list[int], int]], ranks: int) -> int:
    """Each parameter fills whole vectors; each unit is `ranks` equal shards of whole vectors."""
    return sum(up(sum(up(size, VECTOR) for size in sizes), VECTOR * ranks) * itemsize for sizes, itemsize in units)


def expected(seen: Seen, run: Run, ranks: int, rounds: int = 1) -> dict[str, int]:
    """Bytes one rank sends in a step, by purpose: its part of every peer's shard, (N-1)/N of everything."""
    padding = padded_bytes(seen.units, ranks) - seen.psi_bytes
    once, rest = divmod((seen.psi_bytes + padding) * (ranks - 1), ranks)
    assert rest == 0, "shards are not equal"
    params = sum(len(sizes) for sizes, _ in seen.units)
    sent = {"reduce": rounds * once, GATHER[run.stage if ranks > 1 else 0]: once}
    # one byte each, before every further backward too: used, and anything left to reduce
    sent["used-flags"] = rounds * (params + len(seen.units) + SAID_BYTES) * MAX_ROUNDS[ranks]
    if run.clip is not None:
        sent["norm"] = 8 * (ranks - 1)  # one float64 of each rank
    return sent


@pytest.mark.parametrize(
    ("stage", "model", "ranks"),
    thinned(STAGES, ["gpt", "gpt-tied", "conv", "skipping", "odd", "mixed"], RANKS),
)
def test_a_step_sends_two_psi_to_the_byte(stage: int, model: str, ranks: int) -> None:
    run = Run(model=model, stage=stage, clip=1.0)
    for seen in run_ranks(ranks, watch, run):
        wanted, units = expected(seen, run, ranks), len(seen.units)
        _, second, third = seen.steps
        assert second.by_purpose == wanted == second.planned
        assert second.total == sum(wanted.values())
        reduced = wanted["reduce"]
        assert second.by_collective == {
            "reduce-scatter": (reduced, units),
            "all-gather": (second.total - reduced - wanted["used-flags"], units + 1),
            "all-reduce": (wanted["used-flags"], 1),
        }
        assert {purpose: flow.calls for (purpose, _), flow in second.flows.items()} == {
            **dict.fromkeys(wanted, units), "used-flags": 1, "norm": 1,
        }  # fmt: skip
        assert third == second


@pytest.mark.parametrize(("stage", "ranks"), thinned(STAGES, RANKS))
def test_the_first_step_also_agrees_on_an_order_and_nothing_else(stage: int, ranks: int) -> None:
    run = Run(stage=stage)
    for seen in run_ranks(ranks, watch, run):
        wanted = expected(seen, run, ranks)
        assert seen.steps[1].by_purpose == wanted, "unclipped: no norm"
        first = {purpose: sent for purpose, sent in seen.steps[0].by_purpose.items() if purpose != "agree"}
        assert first == wanted


ROUNDS: dict[str | None, tuple[int, int, int]] = {"once": (1, 1, 1), "each": (3, 3, 3), None: (1, 1, 3)}  # by stage


def nonzero(sent: dict[str, int]) -> dict[str, int]:
    return {purpose: size for purpose, size in sent.items() if size}


@pytest.mark.parametrize(
    ("model", "ranks"),
    thinned(["gpt", "gpt-tied", "gpt-checkpoint", "conv", "skipping", "twice", "odd", "mixed"], RANKS),
)
def test_stage_3_sends_what_its_recorded_schedule_says(model: str, ranks: int) -> None:
    """At most Ψ each for forward, backward and gradients; frozen units are gathered too, and never reduced."""
    run = Run(model=model, stage=3, clip=1.0)
    for seen in run_ranks(ranks, watch, run):
        _, second, third = seen.steps
        assert third == second
        assert nonzero(second.by_purpose) == nonzero(second.planned)
        assert second.planned["reduce"] == padded_bytes(seen.units, ranks) * (ranks - 1) // ranks
        if model == "gpt" and ranks > 1:
            assert second.planned["gather-forward"] == second.planned["reduce"] > second.planned["gather-backward"]


@pytest.mark.parametrize(("model", "reduce", "ranks"), thinned(["gpt", "odd"], ROUNDS, [2, 3]))
def test_accumulation_sends_two_psi_reduced_once_and_m_plus_one_psi_reduced_each_time(
    model: str, reduce: str | None, ranks: int
) -> None:
    """Left alone, it reduces once where gradients are whole (2Ψ) and each time where they are sharded (4Ψ)."""
    for stage in STAGES:
        run = Run(model=model, stage=stage, micro=3, reduce=reduce, clip=1.0)
        for seen in run_ranks(ranks, watch, run):
            assert seen.steps[1].by_purpose == expected(seen, run, ranks, ROUNDS[reduce][stage]), f"stage {stage}"
            assert seen.steps[1].by_collective["reduce-scatter"].calls == ROUNDS[reduce][stage] * len(seen.units)
            assert seen.steps[2] == seen.steps[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_size_of_units_changes_the_padding_only(ranks: int) -> None:
    """From one parameter per unit to the whole model in few: the parameters themselves cost the same."""
    totals = []
    for bucket_bytes in (1, 4 << 10, 64 << 20):
        run = Run(stage=2, bucket_bytes=bucket_bytes)
        seen = run_ranks(ranks, watch, run)[0]
        assert seen.steps[1].by_purpose == expected(seen, run, ranks)
        totals.append((len(seen.units), seen.psi_bytes, padded_bytes(seen.units, ranks)))
    units, psi, padded = zip(*totals, strict=True)
    assert units[0] > units[1] > units[2]
    assert psi[0] == psi[1] == psi[2]
    assert padded[0] > padded[2]


def realistic_units() -> tuple[int, list[tuple[list[int], int]], int]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.Embedding(5000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 5000))
    psi_bytes = sum(param.nbytes for param in model.parameters())
    units = engine_of(onefold.shard(model)).units
    sizes = [([param.numel() for param in unit.params], 4) for unit in units]
    return psi_bytes, sizes, sum(unit.flat_params.buffer.nbytes for unit in units)


@pytest.mark.parametrize("ranks", RANKS)
def test_padding_is_under_one_percent_of_a_realistic_model(ranks: int) -> None:
    psi_bytes, units, held = run_ranks(ranks, realistic_units)[0]
    assert psi_bytes <= padded_bytes(units, ranks) == held < psi_bytes * 1.01


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_module_buffers_from_rank_0_are_metered_as_buffers(ranks: int) -> None:
    """Every rank but the first receives them once, whoever passes them on."""
    run = Run(model="conv", stage=2, fields=(("buffers", "rank0"),))
    by_rank = run_ranks(ranks, watch, run)
    sent = [dict(seen.steps[1].by_purpose) for seen in by_rank]
    size = sum(buffer.nbytes for buffer in CASES["conv"].build().buffers())
    assert sum(row.pop("buffers") for row in sent) == size * (ranks - 1)
    assert sent == [expected(seen, run, ranks) for seen in by_rank]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_report_prints_every_purpose_with_its_bytes(ranks: int) -> None:
    run = Run(stage=2, clip=1.0)
    seen = run_ranks(ranks, watch, run)[0]
    rows = {line.split()[0]: line.split()[1:] for line in seen.text.splitlines()[1:]}
    wanted = expected(seen, run, ranks)
    assert rows == {
        **{purpose: [f"{sent:,}", f"{sent:,}"] for purpose, sent in wanted.items()},
        "total": [f"{sum(wanted.values()):,}"],
    }
    assert "measured" in seen.text and "planned" in seen.text
