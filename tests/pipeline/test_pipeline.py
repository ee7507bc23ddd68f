"""Pipeline stages whose state is sharded: the training of one process, and the same bits at every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import onefold
from onefold.errors import ConfigError, ModelError, StateError
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.models import Normed, PipelinePart, Residual, Stack
from tests.pipeline.runs import LAYERS, MICRO, SCHEDULES, STEPS, WIDTH, Trained, alone, batch, piped, together


@pytest.mark.parametrize(("schedule", "ranks"), thinned(SCHEDULES, [2, 4]))
def test_a_pipeline_trains_as_one_process_does_with_the_same_bits_at_every_stage(schedule, ranks):
    wanted, stages = alone(), 2
    runs = [together(run_ranks(ranks, piped, stages, zero, schedule)) for zero in range(4)]
    torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(wanted.losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(runs[0].norms), torch.tensor(wanted.norms), rtol=1e-5, atol=1e-6)
    assert runs[0].params.keys() == wanted.params.keys()
    for name, value in wanted.params.items():
        torch.testing.assert_close(runs[0].params[name], value, rtol=1e-4, atol=1e-5)
    for run in runs[1:]:
        assert (run.losses, run.norms) == (runs[0].losses, runs[0].norms)
        assert all(torch.equal(run.params[name], value) for name, value in runs[0].params.items())


def with_muon(stages: list[int]) -> list[Trained]:
    return [piped(2, zero, "1f1b", muon=True) for zero in stages]


def test_muon_trains_a_pipeline_to_the_same_bits_at_every_stage():
    """Each stage of the pipeline has owners of its own."""
    first, *others = map(together, map(list, zip(*run_ranks(4, with_muon, [0, 1, 2, 3]), strict=True)))
    assert first.losses[-1] < first.losses[0]
    for run in others:
        assert (run.losses, run.norms) == (first.losses, first.norms)
        assert all(torch.equal(run.params[name], value) for name, value in first.params.items())


def interleaved(zero: int) -> Trained:
    """Four stages on two ranks: each holds one of the first half and one of the second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    mine = [mesh["pp"].get_local_rank(), mesh["pp"].get_local_rank() + 2]
    parts, stages = [], []
    for at in mine:
        torch.manual_seed(0)
        parts.append(
            onefold.shard(
                PipelinePart(at, at + 1, depth=LAYERS, dim=WIDTH), stage=zero, mesh=mesh["shard"], bucket_bytes=1 << 12
            )
        )
        stages.append(onefold.PipelineStage(parts[-1], mesh, reduce="each", index=at, stages=4))
    optimizers = [onefold.Optimizer(part, torch.optim.SGD, lr=0.1, momentum=0.9) for part in parts]
    run = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=nn.MSELoss(), scale_grads=False)
    means = []
    for step in range(STEPS):
        x, y = batch(step)
        losses: list[Tensor] = []
        run.step(*[x] * stages[0].is_first, target=y if stages[1].is_last else None, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means += [torch.stack(losses).mean().item()] if losses else []
    return Trained(means, [], {k: v for part in parts for k, v in onefold.full_state_dict(part).items()}, {}, {})


def test_a_rank_may_hold_several_stages():
    wanted, found = alone(float("inf")), together(run_ranks(2, interleaved, 3))
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), rtol=1e-5, atol=1e-6)
    for name, value in wanted.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-4, atol=1e-5)


def test_units_kept_across_micro_batches_are_gathered_once_a_step():
    """Of a stage's two layers, the first fits the budget: one gather instead of one per forward and backward."""
    plain = run_ranks(4, piped, 2, 3, "1f1b")
    for before, after in zip(plain, run_ranks(4, piped, 2, 3, "1f1b", "each", 20_000), strict=True):
        assert after.losses == before.losses
        assert all(torch.equal(after.params[name], value) for name, value in before.params.items())
        sizes = list(before.units.values())
        names = list(before.units)
        kept, budget = 0, 20_000
        for name in names:
            if 2 * before.units[name] <= budget:  # whole: two shards
                budget -= 2 * before.units[name]
                kept += before.units[name]
        assert 0 < kept < sum(sizes)
        assert before.sent["gather-forward"] == MICRO * sum(sizes)
        assert after.sent["gather-forward"] == MICRO * (sum(sizes) - kept)
        assert after.sent["gather"] == kept
        assert after.sent["gather-backward"] < before.sent["gather-backward"]


def stage_alone(**fields: object) -> onefold.PipelineStage:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    return onefold.PipelineStage(onefold.shard(nn.Linear(4, 4)), mesh, **fields)


def scaled_by_torch() -> None:
    ScheduleGPipe(stage_alone(), 2, loss_fn=nn.MSELoss()).step(torch.ones(4, 4), target=torch.ones(4, 4))


def not_sharded() -> None:
    onefold.PipelineStage(nn.Linear(4, 4), init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))


def no_pipeline_axis() -> None:
    onefold.PipelineStage(onefold.shard(nn.Linear(4, 4)), init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))


def no_budget() -> None:
    stage_alone(keep_bytes=-1)


def split_backward() -> None:
    stage_alone().backward_one_chunk(0, full_backward=False)


def half_precision() -> None:
    part = onefold.shard(nn.Linear(4, 4), precision="fp16")
    onefold.PipelineStage(part, init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))


def clipped_by_parts() -> None:
    stage = stage_alone(index=0, stages=2)
    optimizer = onefold.Optimizer(stage.submod, torch.optim.SGD, lr=0.1)
    stage.submod(torch.ones(1, 4)).sum().backward()
    optimizer.clip_grad_norm(1.0)


def tied_in_several_parts() -> None:
    stage_alone(index=0, stages=2, tied=["weight"])


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (half_precision, ConfigError, "precision='bf16'"),
        (clipped_by_parts, StateError, "several stages of a pipeline"),
        (tied_in_several_parts, ConfigError, "one stage per rank"),
        (scaled_by_torch, StateError, "scale_grads=False"),
        (not_sharded, ModelError, "onefold.shard"),
        (no_pipeline_axis, ConfigError, "axis named 'pp'"),
        (no_budget, ConfigError, "keep_bytes"),
        (split_backward, ConfigError, "Schedule1F1B"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(mistake, error, said):
    [caught] = run_ranks_raises(1, mistake)
    assert caught.type_name.endswith(error.__name__) and said in caught.message


def with_statistics(given: bool) -> int:
    mesh = onefold.mesh(pp=2)
    part = onefold.shard(Normed(WIDTH, WIDTH), mesh=mesh)
    example = torch.zeros(2, WIDTH) if given else None
    stage = onefold.PipelineStage(part, mesh, input_args=example, output_args=example)
    run = ScheduleGPipe(stage, MICRO, loss_fn=nn.MSELoss(), scale_grads=False)
    x, y = batch(0)
    run.step(*[x] * stage.is_first, target=y if stage.is_last else None, losses=[])
    return int(part.norm.num_batches_tracked)


@pytest.mark.parametrize("given", [False, True])
def test_learning_the_shapes_leaves_statistics_alone(given):
    assert run_ranks(2, with_statistics, given) == [MICRO, MICRO]


def shared_inputs(policy: str) -> list[float]:
    """Two stages of two ranks each that hold the same: P_a shares what they have alike."""
    mesh = onefold.mesh(pp=2, tp=2, shard=1)
    torch.manual_seed(mesh["pp"].get_local_rank())
    layers = nn.ModuleList(Residual(WIDTH, activation=torch.relu) for _ in range(2))
    part = onefold.shard(Stack(layers), mesh=mesh, activations=policy)
    stage = onefold.PipelineStage(part, mesh)
    optimizer = onefold.Optimizer(part, torch.optim.SGD, lr=0.1)
    run = Schedule1F1B(stage, MICRO, loss_fn=nn.MSELoss(), scale_grads=False)
    norms = []
    for step in range(2):
        x, y = batch(step)
        run.step(*[x] * stage.is_first, target=y if stage.is_last else None, losses=[])
        norms.append(optimizer.clip_grad_norm(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_block_inputs_are_shared_inside_the_stages_of_a_pipeline():
    kept = run_ranks(4, shared_inputs, "keep")
    assert run_ranks(4, shared_inputs, "partition") == kept
