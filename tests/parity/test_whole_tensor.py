"""Optimizers that need whole tensors train to the same bits at every stage; on one rank, to torch's own."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.cost.states import StateCost
from onefold.observe.rehearsal import rehearse
from onefold.optim.whole_unit_optimizer import DIRECTION, GRADIENT, MASTER, PURPOSES, UPDATED
from tests.harness import run_ranks
from tests.models import GPT_SEQ, MODELS
from tests.parity.training import Run, batch_for, differing, digest_of, same_bits
from tests.parity.whole import CLASSES, LAMB, MUON, muon, one_for_all, train_plain, train_whole

STAGES = (1, 2, 3)


def compare(runs: list[Run]) -> list[str]:
    """On every rank: what differs between stages, and the digest of stage 0."""
    found = []
    for run in runs:
        reference = train_whole(run)
        for stage in STAGES:
            trained = train_whole(run.at(stage))
            found += [f"{run} at stage {stage}: {name}" for name in differing(trained, reference)]
            if trained.losses != reference.losses:
                found.append(f"{run} at stage {stage}: losses")
            if not all(same_bits(a, b) for a, b in zip(trained.norms, reference.norms, strict=True)):
                found.append(f"{run} at stage {stage}: norms")
        found.append(digest_of(reference))
    return found


def assert_equal(ranks: int, *runs: Run) -> None:
    verdicts = run_ranks(ranks, compare, list(runs))
    assert all(len(one) == len(runs) for one in verdicts), verdicts[0]
    assert all(one == verdicts[0] for one in verdicts), "ranks ended with different parameters"


@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_are_bitwise_equal_for_every_class(ranks: int) -> None:
    models = ["gpt", "conv"] if ranks == 2 else ["conv", "gpt"]
    runs = [Run(optimizer=name, model=models[i % 2]) for i, name in enumerate(CLASSES)]
    ours = ["gpt", "conv", "experts"] if ranks == 2 else ["experts", "channels-last"]
    assert_equal(ranks, *runs, *(Run(optimizer=MUON, model=model) for model in ours))


def plain_and_ours() -> list[str]:
    runs = [Run(optimizer=name, stage=number % 4) for number, name in enumerate((*CLASSES, MUON))]
    return [f"{run}: {name}" for run in runs for name in differing(train_whole(run), train_plain(run))]


def test_one_rank_equals_torchs_own_class() -> None:
    assert run_ranks(1, plain_and_ours) == [[]]


# -- with everything else ----------------------------------------------------------------------------------------------


def test_stages_are_bitwise_equal_with_clipping_accumulation_and_16_bits() -> None:
    bf16, split = (("precision", onefold.Precision(compute="bf16", master=kind)) for kind in ("fp32", "split"))
    runs = [
        Run(optimizer="muon", clip=0.05, fields=(bf16,)),
        Run(optimizer="muon", micro=2, reduce="each", clip=0.5, fields=(split,)),
        Run(optimizer="lamb", model="skipping", fields=(split,)),
        Run(optimizer="lamb", model="channels-last", micro=2, reduce="once"),
        Run(optimizer="muon", model="odd", bucket_bytes=1),
        Run(optimizer="muon", grouped=True, clip=0.05, fields=(split,)),
        Run(optimizer=MUON, model="experts", micro=2, reduce="each", clip=0.5, fields=(split,)),
        Run(optimizer=MUON, model="experts", step_in_backward=True, fields=(split,)),
    ]
    assert_equal(3, *runs[::2])
    assert_equal(2, *runs[1::2])


def on_a_mesh() -> list[str]:
    """On every rank: what differs between stages where two replicas have two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    run = Run(optimizer="muon", clip=0.05)
    reference = train_whole(run, mesh)
    return [f"{stage}: {name}" for stage in STAGES for name in differing(train_whole(run.at(stage), mesh), reference)]


def test_stages_are_bitwise_equal_on_a_hybrid_mesh() -> None:
    assert run_ranks(4, on_a_mesh) == [[]] * 4


def options() -> list[str]:
    """On every rank: what settings change that are to change no bit."""
    run = Run(optimizer="muon")
    reference, found = train_whole(run), []
    for stage, field in [
        (1, ("overlap_param_gather", True)),
        (2, ("overlap_param_gather", True)),
        (3, ("keep_whole", 1 << 10)),
        (3, ("prefetch", 0)),
    ]:
        trained = train_whole(dataclasses.replace(run, stage=stage, fields=(field,)))
        found += [f"{stage}, {field}: {name}" for name in differing(trained, reference)]
    return found


def offloaded(path: str) -> list[str]:
    """On every rank: what differs between state on the host, or on disk, and on the device."""
    found = []
    host, disk = onefold.Offload(optimizer="host"), onefold.Offload(optimizer="disk", path=path)
    everything = onefold.Offload(optimizer="host", parameters="host")
    split = onefold.Precision(compute="bf16", master="split")
    for stage, name, tiers, precision in (
        (1, MUON, host, "fp32"),
        (2, "lamb", host, "bf16"),
        (3, MUON, host, split),
        (3, MUON, everything, "fp32"),
        (1, "shampoo", disk, "bf16"),
        (3, MUON, disk, split),
    ):
        run = Run(optimizer=name, stage=stage, clip=0.5, fields=(("precision", precision),))
        reference = train_whole(run)
        trained = train_whole(dataclasses.replace(run, fields=(*run.fields, ("offload", tiers))))
        found += [f"{stage}, {tiers}: {name}" for name in differing(trained, reference)]
    return found + offloaded_bytes(host, f"{path}/host") + offloaded_bytes(disk, f"{path}/disk")


def offloaded_bytes(tiers: onefold.Offload, folder: str) -> list[str]:
    """On every rank: what is not where it should be, or not as planned, or not what a run on the device loads."""
    torch.manual_seed(0)
    case = MODELS["experts"]
    model = onefold.shard(case.build(), stage=3, offload=tiers)
    optimizer = muon(model, "experts")
    for step in range(3):
        case.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    held = onefold.memory(model)
    away = [row for row in held.elsewhere if row.state == "optimizer"]
    wrong = [f"{row}" for row in away if row.measured != row.planned]
    onefold.save(folder, model, optimizer)
    near = onefold.shard(case.build(), stage=1)
    loaded = muon(near, "experts")
    onefold.load(folder, near, loaded)
    for one, by in ((model, optimizer), (near, loaded)):
        case.loss(one, batch_for(3, 0, dist.get_rank()), 3).backward()
        by.step()
    wanted, found = (onefold.full_state_dict(one) for one in (near, model))
    wrong += [f"{tiers}: {name} after a load" for name, value in wanted.items() if not same_bits(found[name], value)]
    return wrong + (["nothing is offloaded"] if held.optimizer.measured or not away else [])


def in_backward(path: str) -> list[str]:
    """On every rank: what differs between updates in backward, with state on any tier, and at step()."""
    found = []
    split = ("precision", onefold.Precision(compute="bf16", master="split"))
    for model, stage, fields, tiers in (
        ("skipping", 0, (), None),
        ("gpt", 1, (), "host"),
        ("conv", 2, (), None),
        ("gpt", 3, (split,), onefold.Offload(optimizer="disk", path=path)),
        ("experts", 3, (), onefold.Offload(optimizer="host", parameters="host")),
    ):
        run = Run(optimizer=MUON, model=model, stage=stage, fields=fields)
        inside = dataclasses.replace(run, step_in_backward=True, fields=(*fields, ("offload", tiers)))
        reference, trained = train_whole(run), train_whole(inside)
        found += [f"{run}: {name}" for name in differing(trained, reference)]
    return found


def one_and_two_optimizers() -> list[str]:
    """On every rank: what differs between Muon and AdamW in one Optimizer and in two."""
    two = train_whole(Run(optimizer="muon", stage=2))
    runs = [Run(optimizer="muon", stage=stage, grouped=True) for stage in range(4)]
    return [f"{run.stage}: {name}" for run in runs for name in differing(train_whole(run), two)]


def test_muon_and_adamw_in_one_optimizer_are_those_in_two() -> None:
    assert run_ranks(2, one_and_two_optimizers) == [[], []]


def test_settings_that_move_bytes_change_no_bit() -> None:
    assert run_ranks(2, options) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_on_the_host_or_on_disk_changes_no_bit(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, offloaded, str(tmp_path)) == [[]] * ranks


def test_updates_in_backward_have_the_bits_of_those_at_step(tmp_path: Path) -> None:
    assert run_ranks(2, in_backward, str(tmp_path)) == [[], []]


# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    unplanned: list[str]  # traffic and memory that are not as planned
    state_bytes: int
    once_bytes: int  # of all state, kept once
    extra_bytes: dict[str, int]  # sent for the update, by purpose


def costs(stages: list[int]) -> list[Cost]:
    """On every rank: what torch's Muon (stage 1) and LAMB (stage 2) beside AdamW cost, and onefold.Muon (stage 3)."""
    onefold.init()
    found, case = [], MODELS["gpt"]
    for stage in stages:
        torch.manual_seed(0)
        make = {1: partial(one_for_all, name="muon"), 2: partial(one_for_all, name="lamb")}.get(
            stage, partial(muon, name="gpt")
        )
        precision = onefold.Precision(compute="bf16", master="split" if stage == 3 else "fp32")
        zero = onefold.Zero(stage=stage, bucket_bytes=64 << 10, precision=precision)
        tokens = torch.zeros(2, GPT_SEQ, dtype=torch.long)
        ranks = {"ranks": dist.get_world_size(), "rank": dist.get_rank()}
        rehearsed = rehearse(case.build(), tokens, zero, StateCost(0), optimizer=make, **ranks)
        model = onefold.shard(case.build(), zero)
        optimizer = make(model)
        for step in range(2):
            optimizer.zero_grad()
            case.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        sent, memory = onefold.traffic(model), onefold.memory(model).optimizer
        extra = {purpose: sent.by_purpose[purpose] for purpose in PURPOSES if purpose in sent.by_purpose}
        unplanned = [
            f"{key}: {sent.by_purpose.get(key)} of {n}"
            for key, n in sent.planned.items()
            if sent.by_purpose.get(key) != n
        ]
        unplanned += [str(memory)] if memory.measured != memory.planned else []
        unplanned += [str(rehearsed.states)] if memory.measured != rehearsed.states.optimizer else []
        for key, flow in sent.flows.items():
            if key[0] in PURPOSES and rehearsed.sent.get(key) != flow:
                unplanned.append(f"{key}: rehearsed {rehearsed.sent.get(key)}, sent {flow}")
        moments = [tensor.numel() * 4 for tensor in optimizer.state_tensors() if tensor.ndim]
        updates = onefold.placement(model).updates
        once = sum(math.prod(one.shape) * (4 if one.cls == "Muon" else 8) for one in updates)
        found.append(Cost(unplanned, sum(moments), once, extra))
    return found


def test_state_is_kept_once_across_ranks_and_bytes_are_as_planned() -> None:
    params = list(MODELS["gpt"].build().parameters())
    psi, padding = sum(param.numel() for param in params), 64 * len(params)  # where AdamW updates flat vectors
    for stage, rows in enumerate(zip(*run_ranks(3, costs, [1, 2, 3]), strict=True), start=1):
        assert [row.unplanned for row in rows] == [[]] * 3
        assert 0 <= sum(row.state_bytes for row in rows) - rows[0].once_bytes <= 8 * padding
        sent = {name: sum(row.extra_bytes[name] for row in rows) for name in rows[0].extra_bytes}  # by all ranks
        widths = {GRADIENT: 2, MASTER: 4, UPDATED: 4} if stage == 2 else {GRADIENT: 2, DIRECTION: 2}  # LAMB's, Muon's
        elements = sent[GRADIENT] // widths[GRADIENT]
        assert 0 < elements <= psi and sent == {name: width * elements for name, width in widths.items()}


# -- lives of a model --------------------------------------------------------------------------------------------------


def trained_while_frozen(stage: int, make: Any) -> dict[str, Tensor]:
    """A parameter that is frozen joins after two steps, another leaves; a step that is not finite is skipped."""
    torch.manual_seed(3)
    case = MODELS["mlp"]
    model = case.build()
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    onefold.shard(model, stage=stage, bucket_bytes=1 << 10)
    optimizer = make(model, on_nonfinite="skip")
    for step in range(6):
        if step == 2:
            first.requires_grad_(True)
        if step == 4:
            last.requires_grad_(False)
        loss = case.loss(model, batch_for(step, 0, dist.get_rank()), step)
        (loss * float("inf") if step == 3 and dist.get_rank() == 0 else loss).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped == 1
    with onefold.full_parameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained_from_meta(stage: int) -> dict[str, Tensor]:
    """Built without memory, averaged, and with a state_dict() that is loaded in between."""
    torch.manual_seed(3)
    case = MODELS["mlp"]
    with torch.device("meta"):
        model = case.build()
    onefold.shard(model, stage=stage, bucket_bytes=1 << 10)
    optimizer, average = one_for_all(model, "muon"), onefold.EMA(model, decay=0.9)
    for step in range(3):
        case.loss(model, batch_for(step, 0, dist.get_rank()), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with average.applied(), onefold.full_parameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def lamb_while_frozen(stage: int) -> dict[str, Tensor]:
    return trained_while_frozen(stage, partial(onefold.Optimizer, cls=LAMB))


def muon_while_frozen(stage: int) -> dict[str, Tensor]:
    """All that Muon updates is frozen at first."""
    return trained_while_frozen(stage, onefold.Muon)


def lives() -> list[str]:
    """On every rank: what differs between stages."""
    onefold.init()
    found = []
    for train in (lamb_while_frozen, muon_while_frozen, trained_from_meta):
        reference = train(0)
        for stage in STAGES:
            values = train(stage)
            found += [
                f"{train.__name__} {stage}: {name}" for name in values if not same_bits(values[name], reference[name])
            ]
    return found


def test_stages_are_bitwise_equal_with_frozen_parameters_skipped_steps_averages_and_meta() -> None:
    assert run_ranks(2, lives) == [[], []]


# -- refused -----------------------------------------------------------------------------------------------------------


def disagreeing() -> str:
    """On every rank: what is said if the last one gives onefold.Muon a name that no parameter has."""
    onefold.init()
    model = onefold.shard(MODELS["mlp"].build())
    with pytest.raises(onefold.OnefoldError) as caught:
        onefold.Muon(model, place={"0.weight": "muon"} if dist.get_rank() == 0 else {"1.weight": "muon"})
    with pytest.raises(onefold.OptimizerError, match=r"make it: onefold\.Muon\(model"):
        onefold.Optimizer(model, onefold.Muon)
    return str(caught.value)


def test_a_mistake_of_one_rank_ends_all() -> None:
    for said in run_ranks(2, disagreeing):
        assert "place= names '1.weight', which no parameter is called" in said
