"""What stage 3 sends, to the byte, in which order, and how far ahead of need."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from onefold.comm.strategy import max_rounds
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import Language, Residual, blocks
from tests.parity.stage3.compare import batch
from tests.parity.test_traffic import padded_bytes

VOCAB, LAYERS, ONE = 40, 5, 1 << 20  # bytes, as bucket_bytes: a unit per block
TOKENS, BLOCKS, HEAD = "tokens.weight", [f"layers.{i}" for i in range(LAYERS)], "norm.weight…"


class Seen(NamedTuple):
    reports: list[onefold.TrafficReport]
    traces: list[list[tuple[str, str]]]
    units: dict[str, tuple[list[int], int]]  # sizes of parameters, and bytes per element


def speak(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (2, 7), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def watch(evaluations: int = 0, note: bool = False, **fields: Any) -> Seen:
    model = onefold.shard(Language(VOCAB, LAYERS), stage=3, **{"bucket_bytes": ONE, "units": Residual, **fields})
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    engine, reports, traces = engine_of(model), [], []
    trace = engine.unsharding.gathers.trace
    if note:
        for name, layer in zip(BLOCKS, model.layers, strict=True):
            layer.norm.register_forward_hook(partial(lambda name, *_: trace.append(("forward", name)), name))
            layer.norm.register_full_backward_hook(partial(lambda name, *_: trace.append(("backward", name)), name))
    for step in range(4):
        speak(model, step).backward()
        for _ in range(evaluations):
            with torch.no_grad():
                speak(model, step)
        adam.step()
        adam.zero_grad()
        reports.append(onefold.traffic(model))
        traces.append(list(trace))
        trace.clear()
    units = {u.name: ([p.numel() for p in u.params], u.params[0].itemsize) for u in engine.all_units}
    return Seen(reports, traces, units)


def sent(seen: Seen, names: list[str], ranks: int) -> int:
    return padded_bytes([seen.units[name] for name in names], ranks) * (ranks - 1) // ranks


def without_norm(report: onefold.TrafficReport) -> dict[str, int]:
    return {purpose: planned for purpose, planned in report.planned.items() if purpose != "norm"}


@pytest.mark.parametrize(("prefetch", "ranks"), thinned([0, 1, 3], [2, 3, 4]))
def test_a_step_sends_three_psi_less_what_backward_has_or_needs_no_more(prefetch: int, ranks: int) -> None:
    """The last unit stays whole for backward, and nobody needs an embedding's values to find its gradient."""
    everything = [TOKENS, *BLOCKS, HEAD]
    for seen in run_ranks(ranks, watch, prefetch=prefetch):
        assert list(seen.units) == everything
        for report in seen.reports[1:]:
            assert report.by_purpose == without_norm(report) == {
                "gather-forward": sent(seen, everything, ranks),
                "gather-backward": sent(seen, BLOCKS, ranks),
                "reduce": sent(seen, everything, ranks),
                "used-flags": (17 + sum(len(sizes) + 1 for sizes, _ in seen.units.values())) * max_rounds(ranks),
            }  # fmt: skip
            calls = {purpose: flow.calls for (purpose, _), flow in report.flows.items()}
            assert calls == {
                "gather-forward": LAYERS + 2, "gather-backward": LAYERS, "reduce": LAYERS + 2, "used-flags": 1,
            }  # fmt: skip


@pytest.mark.parametrize("bucket_bytes", [1, 2 << 10])
def test_several_units_per_block_send_as_planned_from_the_second_step_on(bucket_bytes: int) -> None:
    for seen in run_ranks(2, watch, bucket_bytes=bucket_bytes):
        everything = list(seen.units)
        assert len(everything) > 2 * LAYERS
        for report in seen.reports[1:]:
            assert report.by_purpose == without_norm(report)
            assert report.by_purpose["gather-forward"] == sent(seen, everything, 2)
            assert report.by_purpose["gather-backward"] < sent(seen, everything, 2)


@pytest.mark.parametrize("bucket_bytes", [1, ONE])
def test_the_first_step_gathers_no_unit_twice_in_a_pass(bucket_bytes: int) -> None:
    for seen in run_ranks(2, watch, bucket_bytes=bucket_bytes):
        assert len(seen.traces[0]) == len(set(seen.traces[0]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_under_no_grad_only_the_gathers_of_forward_are_sent(ranks: int) -> None:
    for seen in run_ranks(ranks, watch, 3):
        planned = without_norm(seen.reports[2])
        assert seen.reports[2].by_purpose == {**planned, "gather-forward": 4 * planned["gather-forward"]}


@pytest.mark.parametrize("bucket_bytes", [1, ONE])
def test_units_that_stay_unsharded_after_forward_send_two_psi(bucket_bytes: int) -> None:
    for seen in run_ranks(2, watch, 3, reshard_after_forward=False, bucket_bytes=bucket_bytes):
        for report in seen.reports[1:]:
            planned = without_norm(report)
            assert "gather-backward" not in planned
            assert report.by_purpose == {**planned, "gather-forward": 4 * planned["gather-forward"]}
            assert planned["gather-forward"] == sent(seen, list(seen.units), 2)
        assert all(purpose != "gather-backward" for trace in seen.traces for purpose, _ in trace)


def small(name: str, elements: int) -> bool:
    return name in (TOKENS, "layers.1")


@pytest.mark.parametrize("ranks", [2, 3])
def test_units_kept_whole_send_two_psi(ranks: int) -> None:
    kept, spread = [TOKENS, "layers.1"], ["layers.0", *BLOCKS[2:], HEAD]
    for seen in run_ranks(ranks, watch, keep_whole=small):
        for report in seen.reports[1:]:
            assert report.by_purpose == without_norm(report)
            assert report.by_purpose["gather-updated"] == sent(seen, kept, ranks)
            assert report.by_purpose["gather-forward"] == sent(seen, spread, ranks)
            assert report.by_purpose["gather-backward"] == sent(seen, spread[:-1], ranks)
            assert report.by_purpose["reduce"] == sent(seen, list(seen.units), ranks)


def test_all_units_kept_whole_are_stage_2() -> None:
    for seen in run_ranks(2, watch, keep_whole=1 << 30):
        assert set(seen.reports[1].by_purpose) == {"reduce", "gather-updated", "used-flags"}
        assert seen.reports[1].by_purpose == without_norm(seen.reports[1])


@pytest.mark.parametrize("prefetch", [0, 1, 3, 100])
def test_gathers_follow_the_model_forward_and_its_reverse_backward(prefetch: int) -> None:
    for seen in run_ranks(2, watch, prefetch=prefetch):
        for trace in seen.traces[1:]:
            assert trace == [("gather-forward", name) for name in [TOKENS, *BLOCKS, HEAD]] + [
                ("gather-backward", name) for name in reversed(BLOCKS)
            ]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_as_many_units_as_asked_for_are_gathered_before_a_block_computes(prefetch: int) -> None:
    for seen in run_ranks(2, watch, note=True, prefetch=prefetch):
        for trace in seen.traces[1:]:
            for way, order in (("forward", [*BLOCKS, HEAD]), ("backward", BLOCKS[::-1])):
                for place, name in enumerate(BLOCKS if way == "forward" else BLOCKS[::-1]):
                    before = trace[: trace.index((way, name))]
                    gathered = [unit for purpose, unit in before if purpose == f"gather-{way}" and unit != TOKENS]
                    assert gathered == order[: place + 1 + prefetch], f"{way} of {name}"


def test_auto_measures_for_three_passes_of_a_kind_and_then_looks_ahead() -> None:
    """Every pass follows the list; how far ahead it decided to look depends on the machine."""
    for seen in run_ranks(2, watch, prefetch="auto", note=True):
        for step, trace in enumerate(seen.traces[1:], start=1):
            gathers = [entry for entry in trace if entry[0].startswith("gather")]
            assert gathers == [("gather-forward", name) for name in [TOKENS, *BLOCKS, HEAD]] + [
                ("gather-backward", name) for name in reversed(BLOCKS)
            ]
            ahead = trace.index(("gather-forward", "layers.1")) < trace.index(("forward", "layers.0"))
            assert ahead == (step == 3), "it looked ahead while it measured, or not after"


def sharing(ranks_differ: bool) -> dict[str, int]:
    """Bytes of three forwards inside full_parameters, which gathered everything on the way in."""
    model = onefold.shard(Language(VOCAB, LAYERS), stage=3, bucket_bytes=ONE)
    comm = engine_of(model).comm
    with onefold.full_parameters(model), torch.no_grad():
        comm.meter.cut()
        for step in range(3 + (dist.get_rank() if ranks_differ else 0)):
            speak(model, step)
        comm.meter.cut()
        return {purpose: flow.sent_bytes for (purpose, _), flow in comm.meter.last_step.items()}


@pytest.mark.parametrize("ranks_differ", [False, True])
def test_forwards_inside_full_parameters_send_nothing(ranks_differ: bool) -> None:
    assert run_ranks(2, sharing, ranks_differ, timeout_s=10) == [{}, {}]


def two_models() -> list[list[str]]:
    """Two alike models under one loss: each sends what it would send alone."""
    models = [onefold.shard(nn.Sequential(*blocks(3)), stage=3, bucket_bytes=ONE) for _ in range(2)]
    adams = [onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2) for model in models]
    for step in range(3):
        a, b = (model(batch(step)) for model in models)
        (a.square().mean() + (a - b).abs().mean()).backward()
        for adam in adams:
            adam.step()
            adam.zero_grad()
    reports = [onefold.traffic(model) for model in models]
    return [[f"{k}: {v}" for k, v in r.by_purpose.items() if v != r.planned[k]] for r in reports]


def test_two_models_under_one_loss_each_send_as_planned() -> None:
    assert run_ranks(2, two_models) == [[[], []], [[], []]]
