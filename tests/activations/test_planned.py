"""What is planned for activations is what ranks measure, and the decision between policies is the paper's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.activations import automatic
from onefold.activations.automatic import Seen, choose_policy
from onefold.cost.activations import Option, choose_activations
from onefold.cost.estimate import Choice
from onefold.cost.recommend import activations_for
from onefold.cost.shapes import PAPER, Shape
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
        GPT(SHAPE), (TOKENS, TOKENS), zero, cost_of("adamw"), ranks=1 if shared else 2, tp=2 if shared else 1
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
    ("room", "tp", "policy"),
    [
        (1000, 1, "keep"), (100, 1, "checkpoint"), (50, 1, "checkpoint+host"), (1, 1, "checkpoint+host"),
        (100, 4, "checkpoint"), (50, 4, "partition"), (20, 4, "partition+host"),
    ],
)  # fmt: skip
def test_auto_takes_the_first_policy_that_fits_the_room(room: int, tp: int, policy: str) -> None:
    assert choose_policy(Seen(kept=12, inputs=1, room=room), blocks=48, tp=tp)[0] == policy


def decided(states: int, tp: bool, tight: float) -> list[Any]:
    """On a rank: what "auto" did on a model whose states fill the machine but for `tight` block inputs."""
    from onefold.runtime.engine import engine_of

    onefold.init()
    torch.manual_seed(0)
    room = int(tight * INPUT_BYTES) + states * dist.get_rank()  # the smallest counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "room_left", lambda resolved, strategy: room)
        model = onefold.shard(ManyInputsNet(8), stage=2, activations="auto", mesh=mesh_of("partition") if tp else None)
    before = onefold.placement(model).why
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    for step in range(2):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    now = onefold.memory(model)
    store = engine_of(model).checkpoints
    return [before, onefold.placement(model).why, now.checkpoints.measured, now.checkpoints_host.measured, bool(store)]


@pytest.mark.parametrize(
    ("tight", "tp", "policy", "device", "host"),
    [
        (1000, False, "keep", 0, 0),
        (30, False, "checkpoint", 8, 0),
        (18, False, "checkpoint+host", 0, 8),
        (18, True, "partition", 4, 0),
        (14, True, "partition+host", 0, 4),
    ],
)
def test_auto_decides_when_the_first_block_runs_and_says_why(tight, tp, policy, device, host) -> None:
    for before, why, kept, away, stored in run_ranks(2, decided, 1 << 30, tp, tight):
        assert "decides when the first block runs" in before
        assert why.startswith(f"activations={policy!r}: ")
        assert "fits with" in why or "comes closest" in why
        assert (kept, away, stored) == (device * INPUT_BYTES, host * INPUT_BYTES, policy != "keep")
