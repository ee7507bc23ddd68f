"""Parameters that are split over tp: seen whole, held in part, released, refused; and plain parts, Megatron's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onefold
from tests.harness import run_ranks, run_ranks_raises
from tests.models import DIM, MegatronResidual, OneBuffer, Residual, Scaled, full_tensor
from tests.parity.training import same_bits
from tests.tensor.runs import Run, built, stream_of, turn


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(DIM, 4 * DIM) for _ in range(2)))


def split(tp: Any) -> nn.Sequential:
    model = plain()
    for block in model:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(step: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(step))


# -- what users see ----------------------------------------------------------------------------------------------------


def see(stage: int) -> dict[str, Any]:
    mesh = onefold.mesh(shard=2, tp=2)
    model = onefold.shard(split(mesh["tp"]), stage=stage, mesh=mesh, bucket_bytes=4 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, groups=[{"params": list(model.parameters())}], lr=0.1)
    weight = model[0].down.weight
    before = weight.to_local().isnan().all().item()
    model(batch(0)).square().mean().backward()
    optimizer.step()
    with onefold.full_parameters(model):
        local = weight.to_local()
        inside = (type(weight).__name__, tuple(weight.shape), tuple(local.shape), local.isnan().any().item())
        whole = weight.full_tensor()
    grad = weight.grad
    memory = onefold.memory(model)
    return {
        "released": before,
        "inside": inside,
        "shape": (tuple(weight.shape), weight.dtype, weight.placements),
        "grad": (type(grad).__name__, tuple(grad.shape)),
        "reads": weight.to_local().isnan().all().item(),
        "as planned": memory.parameters.measured == memory.parameters.planned,
        "elements": sum(row.elements for row in onefold.placement(model).rows),
        "whole": whole,
        "state": onefold.full_state_dict(model).get("0.down.weight"),
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_split_parameter_shows_the_whole_shape_and_holds_its_part(stage: int) -> None:
    norms, biases, matrices = 2 * DIM, 2 * DIM + DIM, 4 * DIM * DIM  # of one block and one rank: half of each matrix
    for rank, seen in enumerate(run_ranks(4, see, stage)):
        assert seen["shape"] == ((DIM, 4 * DIM), torch.float32, (Shard(1),))
        assert seen["inside"] == ("DTensor", (DIM, 4 * DIM), (DIM, 2 * DIM), False)
        assert seen["grad"] == ("DTensor" if stage == 0 else "ShardedGradient", (DIM, 4 * DIM))
        assert seen["released"] == seen["reads"] == (stage == 3), "a released one reads NaN"
        assert seen["as planned"] and seen["elements"] == 2 * (norms + biases + matrices)
        assert rank or same_bits(seen["whole"], seen["state"])


def write_through(how: str, stage: int) -> str:
    mesh = onefold.mesh(shard=2, tp=2)
    model = onefold.shard(split(mesh["tp"]), stage=stage, mesh=mesh)

    def write(*_: Any) -> None:
        weight = model[0].up.weight
        (weight if how == "whole" else weight.to_local()).mul_(1.0)

    if how == "elsewhere":
        nn.Module._apply(model[0].up, Tensor.half)  # past the module's own, which refuses
    try:
        with torch.no_grad():
            if how == "released":
                model[0].up.weight.to_local().fill_(1.0)
            elif how == "half":
                model[0].up.half()
            elif how != "elsewhere":
                model[0].up.register_forward_hook(write)
        with torch.set_grad_enabled(how == "elsewhere"):
            model(batch(0))
    except onefold.StateError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("how", "stage", "named"),
    [
        ("released", 3, "0.up.weight was written"),
        ("whole", 3, "0.up.weight was written"),
        ("local", 3, "0.up.weight was written"),
        ("half", 2, "cannot become torch.float16"),
        ("elsewhere", 2, "0.up.weight left the flat buffer"),
    ],
)
def test_a_write_that_would_be_lost_is_named(how: str, stage: int, named: str) -> None:
    assert all(named in said for said in run_ranks(4, write_through, how, stage))


# -- Megatron's way: plain parameters that are parts -------------------------------------------------------------------


def train(stage: int, kind: str, steps: int = 3) -> tuple[dict[str, Tensor], list[Tensor]]:
    mesh = onefold.mesh(shard=2, tp=2)
    tp = mesh["tp"]
    model = split(tp) if kind == "DTensor" else nn.Sequential(*(MegatronResidual(block, tp, True) for block in plain()))
    onefold.shard(model, stage=stage, mesh=mesh, bucket_bytes=4 << 10)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    norms = []
    for step in range(steps):
        model(batch(10 * step + stream_of(mesh))).square().mean().backward()
        norms.append(optimizer.clip_grad_norm(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model), norms


@pytest.mark.parametrize("stage", [0, 3])
def test_plain_parts_train_as_dtensors_do(stage: int) -> None:
    whole, norms = run_ranks(4, train, stage, "DTensor")[0]
    for rank, (state, found) in enumerate(run_ranks(4, train, stage, "Megatron")):
        torch.testing.assert_close(torch.stack(found), torch.stack(norms), rtol=1e-5, atol=1e-6)
        assert rank or state.keys() == whole.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


def shard_unmarked() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    onefold.shard(nn.Sequential(MegatronResidual(plain()[0], mesh, marked=False)), stage=1, mesh=mesh)


def shard_plain_parts_on_meta() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.weight.tensor_model_parallel = True
    onefold.shard(model, stage=1, mesh=mesh)


def shard_over_another_axis() -> None:
    mesh = onefold.mesh(shard=2, tp=1)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
    onefold.shard(model, stage=2, mesh=mesh)


def shard_without_the_mesh() -> None:
    onefold.shard(split(onefold.mesh(shard=1, tp=2)), stage=2)


def shard_partial_sums() -> None:
    from torch.distributed.tensor import Partial

    mesh = onefold.mesh(shard=1, tp=2)
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False))
    onefold.shard(model, stage=2, mesh=mesh)


def parallelize_after_shard() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    model = onefold.shard(plain(), stage=2, mesh=mesh)
    parallelize_module(model[0], mesh, {"up": ColwiseParallel()})
    model(batch(0))


def shard_a_split_buffer() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    model = OneBuffer(4, "table", torch.arange(4.0))
    model.table = distribute_tensor(model.table, mesh, [Shard(0)])
    onefold.shard(model, stage=2, mesh=mesh)


def load_whole_values() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    model = onefold.shard(split(mesh), stage=2, mesh=mesh, precision="bf16")
    model.load_state_dict(plain().state_dict())


def group_otherwise() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    model = onefold.shard(split(mesh), stage=2, mesh=mesh)
    onefold.Optimizer(model, torch.optim.SGD, lr=0.1 * (1 + dist.get_rank()))


def other_models() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    layers = 1 + (dist.get_rank() == 1)
    onefold.shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), stage=1, mesh=mesh)


def one_rank_lacks_a_split() -> None:
    mesh = onefold.mesh(shard=1, tp=2)
    model = plain()
    if dist.get_rank() == 0:
        weight = DTensor.from_local(model[0].up.weight.detach(), mesh, [Replicate()], run_check=False)
        model[0].up.weight = nn.Parameter(weight)
    onefold.shard(model, stage=1, mesh=mesh)


@pytest.mark.parametrize(
    ("act", "error", "named", "remedy"),
    [
        (shard_unmarked, "MismatchError", "0.up.weight", "tensor_model_parallel = True"),
        (shard_plain_parts_on_meta, "ModelError", "weight", "parallelize_module"),
        (shard_over_another_axis, "ModelError", "weight is a DTensor over ('shard',)", "mesh['tp']"),
        (shard_without_the_mesh, "ModelError", "0.up.weight", "shard(mesh=…)"),
        (shard_partial_sums, "ModelError", "bias is a DTensor with placement", "redistribute"),
        (parallelize_after_shard, "StateError", "0.up.weight", "parallelize_module first"),
        (shard_a_split_buffer, "ModelError", "buffer table", "replicate it"),
        (load_whole_values, "StateError", "0.up.weight", "onefold.load"),
        (group_otherwise, "MismatchError", "param group 0", "same settings"),
        (other_models, "MismatchError", "", "must have equally many"),
        (one_rank_lacks_a_split, "MismatchError", "0.up.weight", "in the same way"),
    ],
)
def test_what_cannot_work_is_named_on_every_rank(act: Callable[[], None], error: str, named: str, remedy: str) -> None:
    for caught in run_ranks_raises(2, act):
        assert caught.type_name in (error, "MismatchError"), caught
        assert named in caught.message and remedy in caught.message, caught


# -- gradients ---------------------------------------------------------------------------------------------------------


def scaled(tp: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Scaled()
    mesh = onefold.mesh(shard=1, tp=2)
    if tp:
        style = ColwiseParallel(use_local_output=False)
        parallelize_module(model, mesh, {"linear": style})
        onefold.shard(model, stage=0, mesh=mesh)
        with implicit_replication():
            model(batch(0)).square().mean().backward()
    else:
        model(batch(0)).square().mean().backward()
    return [model.gain.grad, full_tensor(model.linear.weight.grad)]


def test_a_plain_parameter_with_a_split_gradient_gets_all_of_it() -> None:
    for ours, theirs in zip(run_ranks(2, scaled, True)[1], run_ranks(2, scaled, False)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def replicated_twice(stage: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Two replicas of two ranks that share tensors."""
    mesh = onefold.mesh(shard=1, tp=2, replica=2)
    run = Run(1, 2, stage)
    model, optimizer = built(run, mesh)
    stream = mesh.get_local_rank("replica")
    norms = [turn(run, model, optimizer, step, stream)[1] for step in range(2)]
    return onefold.full_state_dict(model), norms


def test_replicas_of_split_models_train_as_shards_of_them_do() -> None:
    (state, norms), *_ = run_ranks(4, replicated_twice, 2)
    from tests.tensor.runs import alone

    wanted = alone(2, steps=2)
    torch.testing.assert_close(torch.stack(norms), torch.stack(wanted.norms), rtol=1e-5, atol=1e-6)
    for name, value in wanted.params.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6)
