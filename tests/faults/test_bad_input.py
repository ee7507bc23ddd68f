"""A model or setting that cannot work is refused on every rank, at once, with what was found and what to do."""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from onefold import OnefoldError
from tests.harness import CaughtError, fresh_ranks, run_ranks, run_ranks_raises
from tests.models import OneBuffer

PROMPT_S = 10.0  # generous: the two cores may be busy; the library's own limit is 600 s


class Case(NamedTuple):
    act: Callable[[], object]
    error: str
    found: str  # in the message
    remedy: str  # in the message too


def assert_named(caught: CaughtError, case: Case) -> None:
    assert issubclass(getattr(onefold, caught.type_name, Exception), OnefoldError), caught
    assert caught.type_name == case.error, caught
    assert case.found in caught.message and case.remedy in caught.message, caught
    assert caught.seconds < PROMPT_S, caught


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def shard_twice() -> None:
    onefold.shard(onefold.shard(net()))


def shard_around_a_sharded_part() -> None:
    model = nn.Sequential(net(), nn.Linear(2, 2))
    onefold.shard(model[0])
    onefold.shard(model)


def shard_with_a_mesh_of_two_axes() -> None:
    onefold.shard(net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def sparse_gradient() -> None:
    model = onefold.shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    model(torch.tensor([1, 2])).sum().backward()


def accumulate(model: nn.Module, reduce: str | None = None, *, nested: bool = False) -> None:
    with onefold.accumulate(model, reduce=reduce):
        if nested:
            accumulate(model)


def track(model: nn.Module) -> None:
    with onefold.track_memory(model):
        pass


CASES = {
    "stage=7": Case(lambda: onefold.shard(net(), stage=7), "ConfigError", "stage=7", "use one of 0, 1, 2"),
    "stage='2'": Case(lambda: onefold.shard(net(), stage="2"), "ConfigError", "stage='2'", "use one of"),
    "stage=True": Case(lambda: onefold.shard(net(), stage=True), "ConfigError", "stage=True", "use one of"),
    "stage=[2]": Case(lambda: onefold.shard(net(), stage=[2]), "ConfigError", "stage=[2]", "use one of"),
    "a string for Zero": Case(lambda: onefold.shard(net(), "zero2"), "ConfigError", "'zero2'", "a Zero object"),
    "unknown keyword": Case(lambda: onefold.shard(net(), stgae=2), "ConfigError", "stgae", "known are activations"),
    "units is a list": Case(lambda: onefold.shard(net(), units=[nn.Linear]), "ConfigError", "units=[", "tuple"),
    "no parameters": Case(lambda: onefold.shard(nn.ReLU()), "ModelError", "ReLU", "no parameters"),
    "not a module": Case(lambda: onefold.shard([nn.Linear(2, 2)]), "ModelError", "list", "torch.nn.Module"),
    "a module class": Case(lambda: onefold.shard(nn.Linear), "ModelError", "type", "torch.nn.Module"),
    "sharded twice": Case(shard_twice, "ModelError", "sharded before", "call shard() once"),
    "part sharded": Case(shard_around_a_sharded_part, "ModelError", "its part '0'", "on the outermost model"),
    "bf16": Case(lambda: onefold.shard(net().bfloat16()), "ModelError", "0.weight is torch.bfloat16", "model.float()"),
    "complex": Case(
        lambda: onefold.shard(nn.Linear(2, 2, dtype=torch.cfloat)), "ModelError", "weight is torch.complex64", "float32"
    ),
    "lazy": Case(
        lambda: onefold.shard(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))), "ModelError", "1.weight", "one forward"
    ),
    "lazy, first": Case(lambda: onefold.shard(nn.LazyLinear(3)), "ModelError", "weight", "one forward"),
    "lazy buffer": Case(
        lambda: onefold.shard(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))),
        "ModelError", "1.running_mean", "one forward",
    ),
    "meta, in part": Case(
        lambda: onefold.shard(nn.Sequential(nn.Linear(2, 2), frozen(nn.Linear(2, 2, device="meta")))),
        "ModelError", "1.weight", "real device",
    ),
    "meta buffer": Case(
        lambda: onefold.shard(OneBuffer(4, "statistics", torch.ones(4, device="meta"))),
        "ModelError", "statistics", "real device",
    ),
    "sparse gradient": Case(sparse_gradient, "ModelError", "0.weight has a torch.sparse_coo gradient", "sparse=False"),
    "mesh of two axes": Case(shard_with_a_mesh_of_two_axes, "ConfigError", "replicate", "named 'replica', 'shard'"),
    "not a mesh": Case(lambda: onefold.shard(net(), mesh=[0, 1]), "ConfigError", "mesh=[0, 1]", "init_device_mesh"),
    "accumulate sometimes": Case(
        lambda: accumulate(onefold.shard(net()), "sometimes"), "ConfigError", "reduce='sometimes'", "'once', 'each'"
    ),
    "nested accumulate": Case(
        lambda: accumulate(onefold.shard(net()), nested=True), "StateError", "already on", "leave the outer one"
    ),
    "accumulate, unsharded": Case(lambda: accumulate(net()), "ModelError", "Sequential", "onefold.shard(model"),
    "memory, unsharded": Case(lambda: onefold.memory(net()), "ModelError", "Sequential", "onefold.shard(model"),
    "traffic, unsharded": Case(lambda: onefold.traffic(net()), "ModelError", "Sequential", "onefold.shard(model"),
    "track, unsharded": Case(lambda: track(net()), "ModelError", "Sequential", "onefold.shard(model"),
}  # fmt: skip


def provoke(name: str) -> None:
    CASES[name].act()


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_on_every_rank_with_a_named_error(name: str) -> None:
    for caught in run_ranks_raises(2, provoke, name):
        assert_named(caught, CASES[name])


# -- the same model, repaired, is accepted -----------------------------------------------------------------------------


def refused_then_repaired() -> list[float]:
    model = net().bfloat16()
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(onefold.ModelError):
        onefold.shard(model)
    assert [param.data_ptr() for param in model.parameters()] == before
    optimizer = onefold.Optimizer(onefold.shard(model.float()), torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return [param.sum().item() for param in model.parameters()]


def test_a_refused_model_is_untouched_and_can_be_sharded_once_repaired() -> None:
    first, second = run_ranks(2, refused_then_repaired)
    assert first == second


def shard_on_rank_0_only() -> str:
    try:
        onefold.shard(net(), mesh=DeviceMesh("cpu", [0]))
    except onefold.ConfigError as error:
        return str(error)
    return "sharded"


def test_a_rank_outside_the_mesh_is_told_so_and_the_ranks_inside_go_on() -> None:
    inside, outside = run_ranks(2, shard_on_rank_0_only)
    assert inside == "sharded"
    assert "rank 1 is not in [0]" in outside and "on the mesh's ranks only" in outside


# -- no world yet ------------------------------------------------------------------------------------------------------


def shard_without_a_group() -> None:
    assert not dist.is_initialized()
    onefold.shard(net())


def test_shard_before_init_says_to_call_init() -> None:
    (outcome,) = fresh_ranks(1, shard_without_a_group, init=False, timeout_s=20)
    assert outcome.exitcode == 1
    assert "StateError: no process group: call onefold.init() before onefold.shard()" in outcome.error


def init_without(*names: str) -> None:
    dist.destroy_process_group()
    for name in names:
        del os.environ[name]
    onefold.init(timeout_s=5)


@pytest.mark.parametrize(
    "missing", [("WORLD_SIZE",), ("RANK",), ("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT",)], ids=str
)
def test_half_a_torchrun_environment_names_what_is_missing(missing: tuple[str, ...]) -> None:
    for caught in run_ranks_raises(2, init_without, *missing):
        assert_named(caught, Case(init_without, "ConfigError", f"but not {', '.join(missing)}", "torchrun"))
