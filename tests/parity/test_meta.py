"""A model built on the meta device gets its values here, one module at a time, the same at every N and stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import onefold
from tests.harness import fresh_ranks, run_ranks, run_ranks_raises
from tests.harness.resident import KEPT_BYTES, resident_bytes
from tests.models import GPT, FillingChild, OneBuffer, Resettable
from tests.parity.training import same_bits


def built(stage: int, tied: bool = False, init: object = None, seed: int = 3) -> dict[str, Tensor]:
    onefold.init()
    with torch.device("meta"):
        model = Resettable(tied)
    onefold.shard(model, stage=stage, bucket_bytes=4 << 10, seed=seed, init=init)
    with onefold.full_parameters(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1e-2)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    return state


@pytest.mark.parametrize("tied", [False, True])
def test_values_are_the_same_at_every_n_and_stage(tied: bool) -> None:
    reference = run_ranks(1, built, 0, tied)[0]
    assert all(torch.isfinite(value).all() for value in reference.values())
    assert 0.1 < float(reference["layers.0.a.weight"].std()) < 0.13, "not what nn.Linear starts with"
    for ranks, stage in [(2, 0), (2, 3), (3, 3), (4, 2)]:
        for state in run_ranks(ranks, built, stage, tied):
            assert all(same_bits(state[name], value) for name, value in reference.items())


def test_another_seed_gives_other_values_and_modules_differ() -> None:
    first, other = run_ranks(1, built, 3)[0], run_ranks(1, built, 3, seed=4)[0]
    assert not torch.equal(first["tokens.weight"], other["tokens.weight"])
    assert not torch.equal(first["layers.0.a.weight"], first["layers.1.a.weight"])


def halve(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.5)


def test_a_function_fills_what_it_wants() -> None:
    state = run_ranks(2, built, 3, init=halve)[0]
    assert float(state["layers.2.a.weight"].mean()) == 0.5 == float(state["tokens.weight"].mean())
    assert float(state["batch.running_var"].mean()) == 1.0


def test_a_state_dict_and_a_safetensors_file_fill_it(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Resettable().state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    for init in (state, str(tmp_path / "net.safetensors")):
        assert all(same_bits(value, state[name]) for name, value in run_ranks(2, built, 3, init=init)[0].items())


def build_attention() -> None:
    with torch.device("meta"):
        model = GPT()
    onefold.shard(model, stage=3)


def build_rotary() -> None:
    with torch.device("meta"):
        model = OneBuffer(4, "angles", torch.arange(4.0), persistent=False)
    onefold.shard(model, stage=3)


def build_from_a_lacking_state() -> None:
    built(3, init={"tokens.weight": torch.zeros(50, 24)})


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (build_attention, "layers.0.attention.in_proj_weight"),
        (build_rotary, "angles"),
        (build_from_a_lacking_state, "layers.0.a.weight is not in the state"),
    ],
)
def test_what_nobody_fills_is_named_on_every_rank(build: object, named: str) -> None:
    for error in run_ranks_raises(2, build):
        assert error.type_name == "ModelError" and named in error.message


def build_in_shards() -> tuple[int, int, int]:
    """Bytes of the parameters, of what is kept of them, and those that were resident at most beyond what was before."""
    onefold.init()
    warm = onefold.shard(nn.Linear(8, 8), stage=3)
    optimizer = onefold.Optimizer(warm, torch.optim.SGD, lr=0.1)
    warm(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = resident_bytes("VmRSS")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(40)))
    whole = sum(param.nbytes for param in model.parameters())
    onefold.shard(model, stage=3, bucket_bytes=4 << 20)
    return whole, onefold.memory(model).parameters.measured, resident_bytes("VmHWM") - before


def test_a_large_model_is_built_in_memory_for_its_shards() -> None:
    """What was used at most is no more than the shards and three units, whatever the allocator keeps."""
    for outcome in fresh_ranks(4, build_in_shards):
        assert outcome.error is None, outcome.error
        whole, held, most = outcome.value
        assert held <= whole / 4 + (1 << 20)
        assert most <= held + 3 * (4 << 20) + KEPT_BYTES


def masked(dtype: torch.dtype) -> nn.Module:
    """A buffer whose dtype may have no value to spare that could mean: not filled."""
    return OneBuffer(8, "mask", torch.tril(torch.ones(3, 3)).to(dtype))


def fill_masked(dtype: torch.dtype, how: str) -> list[Any]:
    with torch.device("meta"):
        model = masked(dtype)
    init = masked(dtype).state_dict() if how == "state" else None
    return onefold.shard(model, stage=3, init=init).mask.tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_buffers_of_every_dtype_are_filled_or_named(dtype: torch.dtype) -> None:
    assert run_ranks(2, fill_masked, dtype, "state") == [torch.tril(torch.ones(3, 3)).to(dtype).tolist()] * 2
    for error in run_ranks_raises(2, fill_masked, dtype, "nothing"):
        assert error.type_name == "ModelError" and "mask got no values" in error.message


def recurrent(cls: type[nn.Module], stage: int) -> list[float]:
    with torch.device("meta"):
        model = cls(6, 6, num_layers=2)
    model = onefold.shard(model, stage=stage, seed=3)
    return [float(value.sum()) for value in onefold.full_state_dict(model).values()]


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_can_be_built_on_meta(cls: type[nn.Module]) -> None:
    first, whole = run_ranks(2, recurrent, cls, 3)[0], run_ranks(2, recurrent, cls, 0)[0]
    assert first == whole and len(first) == 8


def fill_bossy(stage: int) -> None:
    with torch.device("meta"):
        model = FillingChild()
    onefold.shard(model, stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_fills_its_child_is_refused_at_every_stage(stage: int) -> None:
    for error in run_ranks_raises(2, fill_bossy, stage):
        assert error.type_name == "ModelError" and "wrote child.weight" in error.message


def fill_from_files(folder: str, case: str) -> list[float]:
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole[1].weight = whole[0].weight
    state = {name: torch.ones_like(value) for name, value in whole.state_dict().items()}
    state.pop({"lacks a key": "1.bias", "second name": "0.weight"}.get(case, ""), None)
    path = Path(folder) / f"{case}-{dist.get_rank()}.safetensors"
    if not (case == "on one rank" and dist.get_rank() == 1):
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    model = onefold.shard(model, stage=3, init=path)
    with onefold.full_parameters(model):
        return [float(param.mean()) for param in model.parameters()]


@pytest.mark.parametrize(
    ("case", "word"), [("lacks a key", "ModelError 1.bias is not in the state"), ("on one rank", "is not a file")]
)
def test_a_file_that_lacks_something_is_an_error_on_every_rank(tmp_path: Path, case: str, word: str) -> None:
    for error in run_ranks_raises(2, fill_from_files, str(tmp_path), case):
        assert word in f"{error.type_name} {error.message}"


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    assert run_ranks(2, fill_from_files, str(tmp_path), "second name") == [[1.0, 1.0, 1.0]] * 2
