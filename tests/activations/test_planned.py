"""What is planned for activations is what ranks measure, and the decision between policies is the paper's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import onefold
from onefold.activations import automatic
from onefold.cost import recomputed as recomputed_blocks
from onefold.cost.activations import Option, choose_activations
from onefold.cost.case import Choice
from onefold.cost.recommend import activations_for
from onefold.cost.recomputed import Decision, Seen, choose_policy
from onefold.cost.shapes import PAPER, Shape
from onefold.observe.passes import Cut
from onefold.observe.rehearsal import rehearse
from onefold.observe.simulation import train_step
from onefold.optim.elementwise import cost_of
from onefold.settings.zero import Zero
from onefold.train.run.model import GPT
from tests.activations.runs import INPUT_BYTES, POLICIES, batch, mesh_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import ManyInputsNet
from tests.planner.test_recommendations import question

SHAPE = Shape(layers=6, hidden=64, heads=2, seq=64, vocab=64)
TOKENS = torch.zeros(8, SHAPE.seq, dtype=torch.long)


def measured(zero: Zero) -> dict[str, Any]:
    onefold.init()
    torch.manual_seed(0)
    model = onefold.shard(GPT(SHAPE), dataclasses.replace(zero, mesh=mesh_of(zero.activations)))
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        peak = train_step(model, optimizer, (TOKENS, TOKENS))
    now = onefold.memory(model)
    return {
        "peak": peak,
        "checkpoints": now.checkpoints.measured,
        "host": now.checkpoints_host.measured,
        "sent": dict(onefold.traffic(model).flows),
    }


@pytest.mark.parametrize(("policy", "stage"), thinned(POLICIES, [2, 3]))
def test_bytes_and_traffic_of_every_policy_are_planned(policy: str, stage: int) -> None:
    zero = Zero(stage=stage, activations=policy, bucket_bytes=1 << 20)
    shared = policy.startswith("partition")
    found = run_ranks(2, measured, zero)[0]
    planned = rehearse(
        GPT(SHAPE), (TOKENS, TOKENS), zero, cost_of("adamw"), ranks=1 if shared else 2, cut=Cut(tp=2 if shared else 1)
    )
    assert planned.checkpoints == found["checkpoints"]
    assert planned.checkpoints_host == found["host"]
    assert planned.sent == found["sent"]
    assert planned.peak_bytes == pytest.approx(found["peak"], rel=0.05)
    inputs = SHAPE.layers * TOKENS.numel() * SHAPE.hidden * 4
    kept = 0 if policy == "keep" else inputs // 2 if shared else inputs
    assert (found["host"] if policy.endswith("host") else found["checkpoints"]) == kept


# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "auto"])
def test_60b_shares_its_inputs_and_170b_sends_them_to_the_host(asked: str | None) -> None:
    """C4 and C5, at stage 2 on the paper's hardware, at the paper's batches."""
    for shape, ranks, rows, wanted in (
        (PAPER["60b-wide-128"].shape, 128, 32, "partition"),
        (PAPER["60b"].shape, 400, PAPER["60b"].batch, "partition"),
        (PAPER["170b"].shape, 400, PAPER["170b"].batch, "partition+host"),
    ):
        paper = question(shape, ranks, "v100-32", tp=16, batch=rows, activations=asked)
        estimate, why = activations_for(paper, Choice(2), paper.grid())
        assert estimate.choice.activations == wanted
        assert f"{wanted} fits with" in why and "needs" in why


def test_the_simplest_policy_as_fast_as_the_fastest_is_chosen() -> None:
    keep, again, shared = (Option(name, True, speed, "1 GB") for name, speed in zip("kcp", (1.0, 1.04, 1.2)))
    assert choose_activations([keep, again])[0] == "k"
    assert choose_activations([keep, again, shared]) == ("p", "c would be 15% slower; p fits with 1 GB")
    assert choose_activations([keep._replace(fits=False), again, shared._replace(fits=False)])[0] == "c"
    nothing = [keep._replace(fits=False), again._replace(fits=False, needs="9 GB")]
    assert choose_activations(nothing) == ("c", "nothing fits: c comes closest and needs 9 GB")


@pytest.mark.parametrize(
    ("room", "tp", "policy", "recomputed"),
    [
        (1000, 1, "keep", 0), (600, 1, "checkpoint", 9), (100, 1, "checkpoint", 46), (50, 1, "checkpoint+host", 45),
        (1, 1, "checkpoint+host", 48), (100, 4, "checkpoint", 46), (50, 4, "partition", 46),
        (20, 4, "partition+host", 47),
    ],
)  # fmt: skip
def test_auto_takes_the_first_policy_that_fits_the_room(room: int, tp: int, policy: str, recomputed: int) -> None:
    assert choose_policy(Seen(kept=12, inputs=1, room=room), blocks=48, tp=tp)[:2] == (policy, recomputed)


@given(
    kept=st.integers(1, 10**6), share=st.integers(1, 64), room=st.integers(0, 10**8), more=st.integers(0, 10**7),
    blocks=st.integers(1, 60), tp=st.sampled_from([1, 2, 8]), others=st.integers(0, 3),
)  # fmt: skip
def test_auto_keeps_all_that_fits_and_more_room_never_slows_it(kept, share, room, more, blocks, tp, others) -> None:
    inputs = kept // share

    def slowness(room: int) -> tuple[float, Decision]:
        found = choose_policy(Seen(kept, inputs, room), blocks, tp, others)
        return blocks - found.recomputed + found.recomputed / recomputed_blocks.SPEED[found.policy], found

    (before, found), (after, _) = slowness(room), slowness(room + more)
    assert after <= before * 1.05 + 1e-9  # policies whose speeds differ by less count as equally fast
    budget = recomputed_blocks.USED * room - others * kept
    assert (found.policy == "keep") == (blocks * kept <= budget)
    if found.policy == "checkpoint" and found.recomputed < blocks:
        assert found.recomputed * inputs + (blocks - found.recomputed) * kept <= budget
        fewer = found.recomputed - 1
        assert fewer == 0 or fewer * inputs + (blocks - fewer) * kept > budget


class Decided(NamedTuple):
    before: str  # what placement() says before the first forward
    why: str
    device: float  # kept inputs, in block inputs
    host: float
    twice: list[int]  # blocks that are computed again
    state: dict[str, torch.Tensor]  # all parameters


def decided(tp: bool, tight: float) -> Decided:
    """On a rank: what "auto" does on a model whose states fill the machine but for `tight` block inputs."""
    onefold.init()
    torch.manual_seed(0)
    room = int(tight * INPUT_BYTES) + (1 << 30) * dist.get_rank()  # the smallest counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "room_left", lambda *_, **__: room)
        return trained(tp)


def trained(tp: bool) -> Decided:
    model = onefold.shard(ManyInputsNet(8), stage=2, activations="auto", mesh=mesh_of("partition") if tp else None)
    before = onefold.placement(model).why
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    runs = Counter[int]()
    for step in range(4):  # the first forward runs the first block as it is; the arena has its length after the third
        for number, block in enumerate(model.blocks) if step == 3 else ():
            block.norm.register_forward_hook(lambda *_, number=number: runs.update([number]))
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    now = onefold.memory(model)
    twice = [number for number, times in runs.items() if times == 2]
    kept, away = now.checkpoints.measured / INPUT_BYTES, now.checkpoints_host.measured / INPUT_BYTES
    state = onefold.full_state_dict(model, every_rank=True)
    return Decided(before, onefold.placement(model).why, kept, away, twice, state)


def all_decided(tp: bool, rooms: list[float]) -> list[Decided]:
    return [decided(tp, room) for room in rooms]


ROOMS = {  # with tp or without: block inputs that have room -> policy, blocks computed again, kept on device, on host
    False: {
        1000: ("keep", 0, 0, 0), 60: ("checkpoint", 3, 3, 0), 30: ("checkpoint", 6, 6, 0),
        18: ("checkpoint+host", 7, 0, 7),
    },
    True: {1000: ("keep", 0, 0, 0), 18: ("partition", 7, 3.5, 0), 14: ("partition+host", 7, 0, 3.5)},
}  # fmt: skip


@pytest.mark.parametrize("tp", [False, True])
def test_auto_decides_when_the_first_block_runs_says_why_and_changes_no_bit(tp: bool) -> None:
    for answers in run_ranks(2, all_decided, tp, list(ROOMS[tp])):
        for found, (policy, recomputed, device, host) in zip(answers, ROOMS[tp].values(), strict=True):
            assert "decides when the first block runs" in found.before
            assert found.why.startswith(f"activations={policy!r}: ") and "fits with" in found.why
            assert (f"of {recomputed} of 8 blocks" in found.why) == (recomputed > 0)
            assert (found.device, found.host, found.twice) == (device, host, list(range(recomputed)))
            assert all(torch.equal(value, answers[0].state[name]) for name, value in found.state.items())
