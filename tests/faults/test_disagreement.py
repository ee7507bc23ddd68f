"""Ranks that bring different models, settings or values: every rank raises and says which rank differs, and how."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness import CaughtError, run_ranks, run_ranks_raises
from tests.harness.grids import thinned
from tests.harness.soak import Soak
from tests.models import Assorted

PROMPT_S = 10.0  # the library's own limit is left at 600 s: whoever waits for it hangs


def renamed(model: Assorted) -> None:
    model.other, model.last = model.last, None


def unfrozen(model: Assorted) -> None:
    model.frozen.bias.requires_grad_(True)


def one_more(model: Assorted) -> None:
    model.extra = nn.Parameter(torch.ones(2))


def tied(model: Assorted) -> None:
    model.last.weight = model.frozen.weight = nn.Parameter(torch.ones(3, 3))


def other_buffer(model: Assorted) -> None:
    model.mask = torch.tensor([True, False])


def lazy(model: Assorted) -> None:
    model.last = nn.LazyLinear(3)


def cut_by_rank(name: str, module: nn.Module) -> bool:
    return name == ("first" if dist.get_rank() == 0 else "conv")


def cut_or_raise(name: str, module: nn.Module) -> bool:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError(name)
    return False


class Case(NamedTuple):
    change: Callable[[Assorted], Any] = lambda model: None
    fields: dict[str, Any] = {}  # noqa: RUF012  of the rank that differs
    everywhere: dict[str, Any] = {}  # noqa: RUF012
    named: tuple[str, ...] = ()  # in everyone's message


SHAPE = "parameter first.weight: shape"
DIFFERENT = {
    "name": Case(renamed, named=("parameter other.weight", "parameter last.weight")),
    "shape": Case(lambda m: m.__init__(width=9), named=(f"{SHAPE} (9, 4)", f"{SHAPE} (8, 4)")),
    "dtype": Case(lambda m: m.last.double(), named=("parameter last.weight", "torch.float64", "torch.float32")),
    "requires_grad": Case(unfrozen, named=("parameter frozen.bias", "requires_grad=True", "requires_grad=False")),
    "one more": Case(one_more, named=("parameter extra",)),
    "one less": Case(lambda m: m.last.register_parameter("bias", None), named=("parameter last.bias",)),
    "shared": Case(tied, named=("parameter frozen.weight",)),
    "memory format": Case(lambda m: m.conv.to(memory_format=torch.channels_last), named=("conv.weight",)),
    "buffer shape": Case(other_buffer, named=("buffer mask: shape (2,)", "buffer mask: shape (3,)")),
    "buffer dtype": Case(lambda m: m.norm.running_var.__setattr__("data", torch.ones(8).double()), named=("norm",)),
    "all frozen": Case(lambda m: m.requires_grad_(False), named=("requires_grad=True", "requires_grad=False")),
    "stage": Case(fields={"stage": 1}, named=("[stage=1]", "[stage=2]")),
    "bucket_bytes": Case(fields={"bucket_bytes": 64}, named=("[bucket_bytes=64]", "[bucket_bytes=134217728]")),
    "buffers": Case(fields={"buffers": "rank0"}, named=("[buffers='rank0']", "[buffers='local']")),
    "sync": Case(fields={"sync": "check"}, named=("[sync='check']", "[sync='rank0']")),
    "units": Case(everywhere={"units": cut_by_rank}, named=("unit ",)),
}
FAILS_LOCALLY = {
    "lazy": Case(lazy, named=("last.weight", "lazy")),
    "meta": Case(lambda m: m.last.to("meta"), named=("last.weight", "meta")),
    "half": Case(lambda m: m.half(), named=("first.weight", "float16")),
    "setting": Case(fields={"stage": 7}, named=("stage=7",)),
    "unknown setting": Case(fields={"stgae": 2}, named=("stgae",)),
    "units callable": Case(everywhere={"units": cut_or_raise}, named=("KeyError",)),
}
CASES = {**DIFFERENT, **FAILS_LOCALLY}


def shard_differently(name: str) -> None:
    """The last rank differs."""
    case, model = CASES[name], Assorted()
    fields = dict(case.everywhere)
    if dist.get_rank() == dist.get_world_size() - 1:
        case.change(model)
        fields |= case.fields
    onefold.shard(model, **fields)


def everyone_raised(ranks: int, name: str) -> list[CaughtError]:
    return run_ranks_raises(ranks, shard_differently, name, timeout_s=PROMPT_S)


def missing(caught: CaughtError, name: str) -> list[str]:
    return [text for text in CASES[name].named if text not in caught.message]


@pytest.mark.trials_of("disagreements")
@pytest.mark.parametrize(("name", "ranks"), thinned(DIFFERENT, [2, 3]))
def test_every_rank_raises_the_same_message_that_names_the_rank_and_the_difference(
    name: str, ranks: int, soak: Soak
) -> None:
    errors = everyone_raised(ranks, name)
    assert {caught.type_name for caught in errors} == {"MismatchError"}
    assert len({caught.message for caught in errors}) == 1
    assert missing(errors[0], name) == [], errors[0]
    # rank 0 is the reference; by units= it is rank 0 that cuts otherwise, so rank 1 is the first to differ
    culprit = 1 if name == "units" else ranks - 1
    assert f"rank {culprit} differs from rank 0" in errors[0].message
    assert "the same model with the same settings" in errors[0].message
    soak.tried()


@pytest.mark.trials_of("disagreements")
@pytest.mark.parametrize(("name", "ranks"), thinned(FAILS_LOCALLY, [2, 3]))
def test_where_one_rank_cannot_shard_all_ranks_raise_and_name_it(name: str, ranks: int, soak: Soak) -> None:
    *others, failed = everyone_raised(ranks, name)
    assert failed.type_name in ("ModelError", "ConfigError", "KeyError"), failed  # its own error, or its callable's
    for caught in others:
        assert caught.type_name == "MismatchError" and f"rank {ranks - 1} failed in shard()" in caught.message, caught
        assert failed.message in caught.message and missing(caught, name) == [], caught
    soak.tried()


# -- values ------------------------------------------------------------------------------------------------------------


def values(model: nn.Module) -> dict[str, Tensor]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def check_values(where: str | None, rank: int) -> None:
    model = Assorted()
    if dist.get_rank() == rank and where is not None:
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[where].data
        last = tensor.view(-1)[-1:]
        last.copy_(~last if tensor.dtype is torch.bool else last + 1)
    before = values(model)
    onefold.shard(model, sync="check")
    after = values(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.trials_of("disagreements")
@pytest.mark.parametrize(
    ("where", "ranks"),
    thinned(["last.bias", "frozen.weight", "norm.running_mean", "norm.num_batches_tracked", "mask"], [2, 3]),
)
def test_sync_check_raises_on_every_rank_and_names_the_one_tensor_that_differs(
    where: str, ranks: int, soak: Soak
) -> None:
    for rank in range(1, ranks):
        for caught in run_ranks_raises(ranks, check_values, where, rank, timeout_s=PROMPT_S):
            assert caught.type_name == "MismatchError", caught
            assert f"rank {rank} differs from rank 0" in caught.message and f"values of {where}" in caught.message
    soak.tried()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sync_check_passes_and_changes_nothing_where_all_values_are_equal(ranks: int) -> None:
    run_ranks(ranks, check_values, None, 0)


def shard_own_values(bucket_bytes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(dist.get_rank())
    model = Assorted()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.copy_(
            torch.rand(tensor.shape) * 100 > 50 if tensor.dtype is torch.bool else torch.rand(tensor.shape) * 100
        )
    before = values(model)
    onefold.shard(model, bucket_bytes=bucket_bytes)
    return before, values(model)


@pytest.mark.parametrize(("bucket_bytes", "ranks"), thinned([1, 100, 32 << 20], [2, 3]))
def test_by_default_every_rank_gets_rank_0s_parameters_frozen_ones_and_buffers(bucket_bytes: int, ranks: int) -> None:
    (wanted, _), *_ = results = run_ranks(ranks, shard_own_values, bucket_bytes)
    for rank, (before, after) in enumerate(results):
        assert after.keys() == wanted.keys() and len(wanted) == 15
        assert [name for name in wanted if not torch.equal(after[name], wanted[name])] == [], f"rank {rank}"
        if rank:
            assert not torch.equal(before["first.weight"], wanted["first.weight"])


def shard_with_an_expanded_buffer(sync: str) -> list[float]:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.full((1,), 1.0 + dist.get_rank() * (sync == "rank0")).expand(4))
    onefold.shard(model, sync=sync)
    return model.scale.tolist()


@pytest.mark.parametrize("sync", ["rank0", "check"])
def test_a_buffer_that_is_one_value_expanded_is_brought_in_line_too(sync: str) -> None:
    assert run_ranks(2, shard_with_an_expanded_buffer, sync) == [[1.0] * 4] * 2


def shard_a_row_of_a_mesh() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    onefold.shard(Assorted(9 if dist.get_rank() == 3 else 8), stage=2, mesh=mesh["shard"])
    raise RuntimeError("the other row is well")


def test_ranks_of_a_part_of_the_world_are_called_by_their_number_in_the_world() -> None:
    errors = run_ranks_raises(4, shard_a_row_of_a_mesh)
    assert [error.type_name for error in errors] == ["RuntimeError"] * 2 + ["MismatchError"] * 2
    assert all("rank 3 differs from rank 2" in error.message for error in errors[2:])
