"""What is loaded where: names must match, unless the user says otherwise; and what comes back is what went in."""

from __future__ import annotations

import math
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.checkpoint.format.manifest import ParamRecord
from onefold.checkpoint.format.notes import decode, decode_single, encode, encode_single
from onefold.checkpoint.protocol.names import Choice, match, match_modules
from onefold.runtime.engine import engine_of
from tests.checkpoint.runs import Trainer, digests, same, truth
from tests.checkpoint.test_ranks_agree import said
from tests.harness import run_ranks
from tests.models import ExtraState, NamedPair


def load_counted(folder: str) -> list[Any]:
    """What loading says where a module with extra state is new, gone or has another name; and what it then has."""
    onefold.init()
    plain, counted = nn.Sequential(OrderedDict(up=nn.Linear(6, 6))), nn.Sequential(OrderedDict(up=ExtraState(6, 6)))
    counted.up.calls = 7
    onefold.save(f"{folder}/plain", onefold.shard(plain, stage=2), step=1)
    onefold.save(f"{folder}/counted", onefold.shard(counted, stage=2), step=1)
    found: list[Any] = []
    for allowed in ((), "up", "u*", "up.*"):
        counted.up.calls = 5
        found += [said(onefold.load, f"{folder}/plain", counted, allow_missing=allowed), counted.up.calls]
        found += [said(onefold.load, f"{folder}/counted", plain, allow_extra=allowed)]
    other = onefold.shard(nn.Sequential(OrderedDict(down=ExtraState(6, 6))), stage=2)
    found += [said(onefold.load, f"{folder}/counted", other, rename={"up.": "down."}), other.down.calls]
    return found


def test_extra_state_of_modules_is_allowed_by_pattern_and_renamed_with_the_module(tmp_path):
    missing, kept, extra, *allowed = run_ranks(1, load_counted, str(tmp_path))[0]
    assert "extra state of modules is missing: 'up'" in missing and kept == 5
    assert "extra state of modules is left over: 'up'" in extra
    assert allowed == [None, 5, None] * 3 + [None, 7]


def test_a_module_that_is_renamed_goes_before_one_that_has_the_name():
    choice = Choice(rename={"b.": "a."}, allow_extra=("a",))
    assert match_modules({"a", ""}, {"a", "b", ""}, choice) == {"a": "b", "": ""}


def sharded(net: nn.Module, stage: int = 2, lr: float = 0.1) -> tuple[nn.Module, onefold.Optimizer]:
    model = onefold.shard(net, stage=stage)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=lr)


def step(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    optimizer.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: onefold.Optimizer) -> dict[str, Tensor]:
    trainer = Trainer.__new__(Trainer)
    trainer.model, trainer.optimizer = model, optimizer
    return truth(trainer)


def choose(folder: str) -> dict[str, Any]:
    onefold.init()
    torch.manual_seed(0)
    small, its = sharded(NamedPair())
    step(small, its)
    onefold.save(folder, small, its)
    saved = state(small, its)
    found: dict[str, Any] = {}

    def load(into: nn.Module, name: str, **choice: Any) -> tuple[str | None, dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(1)
        model, optimizer = sharded(into, stage=3, lr=0.5)
        step(model, optimizer)
        step(model, optimizer)
        before = state(model, optimizer)
        error = said(onefold.load, folder, model, optimizer, **choice)
        found[f"{name}: lr"] = optimizer.param_groups[0]["lr"]
        if error is None:
            step(model, optimizer)  # it goes on
            onefold.load(folder, model, optimizer, **choice)
        return error, before, state(model, optimizer)

    found["larger"], before, after = load(NamedPair(more=True), "larger")
    found["larger: untouched"] = digests(before) == digests(after)
    found["allowed"], before, after = load(NamedPair(more=True), "allowed", allow_missing=["gate", "cou*"])
    found["allowed: same"] = all(same(after[name], value) for name, value in saved.items())
    found["allowed: steps"] = after["gate|step"].item(), after["up.bias|step"].item()
    rename = {"up.": "in_.", "down.weight": "out.weight", "down.bias": "out.bias"}
    found["renamed"], _, after = load(NamedPair("in_", "out"), "renamed", rename=rename)
    new = {"up": "in_", "down": "out"}
    found["renamed: same"] = all(same(after[new[n.split(".")[0]] + "." + n.split(".")[1]], v) for n, v in saved.items())
    found["not renamed"], _, _ = load(NamedPair("in_", "out"), "not renamed")
    found["misnamed"], _, _ = load(NamedPair(), "misnamed", rename={"upp.weight": "up.weight"})
    found["subset"], before, after = load(NamedPair(), "subset", subset="up.*")
    kept = {name: value for name, value in before.items() if name.startswith("down.")}
    loaded = {name: value for name, value in saved.items() if name.startswith("up.")}
    found["subset: loaded"] = all(same(after[name], value) for name, value in loaded.items())
    found["subset: steps"] = after["down.bias|step"].item(), kept["down.bias|step"].item()
    found["nothing"], _, _ = load(NamedPair(), "nothing", subset="upp.*")
    wide = NamedPair()
    wide.up = nn.Linear(6, 9, bias=False)
    wide.up.bias = nn.Parameter(torch.zeros(1))
    found["misfit"], _, _ = load(wide, "misfit")
    return found


def test_names_must_match_or_be_allowed_renamed_or_chosen(tmp_path):
    first, second = run_ranks(2, choose, str(tmp_path))
    assert first == second
    assert first["larger"].startswith("CheckpointError: rank 0: missing in the checkpoint: count, gate")
    assert first["larger: untouched"]
    assert first["allowed"] is None and first["allowed: same"]
    assert first["allowed: steps"] == (3.0, 1.0)  # what was not loaded stays as it was
    assert first["renamed"] is None and first["renamed: same"]
    assert "missing in the checkpoint: in_.bias, in_.weight, out.bias, out.weight" in first["not renamed"]
    assert "not in the model: down.bias, down.weight, up.bias, up.weight" in first["not renamed"]
    assert "rename= names upp.weight, which the checkpoint does not have" in first["misnamed"]
    assert first["subset"] is None and first["subset: loaded"] and first["subset: steps"] == (3.0, 2.0)
    assert "subset= names" in first["nothing"] and "the model does not have" in first["nothing"]
    assert "of another shape: up.bias: saved (9,), wanted (1,)" in first["misfit"]
    assert first["allowed: lr"] == first["renamed: lr"] == 0.1 and first["larger: lr"] == 0.5


def tensors(*names: str) -> list[ParamRecord]:
    return [ParamRecord(name, "trained", (2,), (1,), {"value": "F32"}) for name in names]


def test_what_the_user_renames_goes_before_what_only_has_the_name():
    choice = Choice(rename={"b": "a"}, allow_extra=("a",))
    assert match(tensors("a"), tensors("a", "b"), choice) == {"a": "b"}
    assert match(tensors("a"), tensors("b", "a"), choice) == {"a": "b"}
    with pytest.raises(onefold.CheckpointError, match="not in the model: a"):
        match(tensors("a"), tensors("a", "b"), Choice(rename={"b": "a"}))
    with pytest.raises(onefold.CheckpointError, match="rename= maps b and c both to a"):
        match(tensors("a"), tensors("b", "c"), Choice(rename={"b": "a", "c": "a"}))


def test_a_pattern_of_a_subset_that_matches_nothing_is_an_error():
    with pytest.raises(onefold.CheckpointError, match=r"subset= names c\*, which the model does not have"):
        match(tensors("a", "b"), tensors("a", "b"), Choice(subset=("a", "c*")))
    assert match(tensors("a[0]"), tensors("a[0]"), Choice(subset=("a[0]",))) == {"a[0]": "a[0]"}  # a name is itself


def lazy(folder: str, save: bool) -> tuple[Any, Any]:
    onefold.init()
    net = nn.Linear(2, 2)
    net.register_buffer("turned", torch.tensor([1 + 2j, 3 - 4j]).conj() if save else torch.zeros(2, dtype=torch.cfloat))
    model = onefold.shard(net, stage=1)
    extra = OrderedDict(imag=torch.tensor([1 + 2j]).conj().imag, conj=torch.tensor([1 + 2j]).conj())
    if save:
        onefold.save(folder, model, extra=extra, step=1)
    else:
        extra = onefold.load(folder, model)
    return {name: value.tolist() for name, value in extra.items()}, model.turned.tolist()


def test_tensors_that_are_conjugate_or_negative_by_a_mark_only_come_back_as_they_look(tmp_path):
    saved = run_ranks(1, lazy, str(tmp_path), True)
    assert saved == [({"imag": [-2.0], "conj": [1 - 2j]}, [1 - 2j, 3 + 4j])]
    assert run_ranks(2, lazy, str(tmp_path), False) == saved * 2


def misfits(folder: str) -> list[str | None]:
    onefold.init()

    def net(weight: Any, count: Any) -> nn.Module:
        made = nn.Linear(2, 2, bias=False)
        made.weight = nn.Parameter(torch.full((2, 2), weight))
        made.register_buffer("count", torch.tensor(count))
        return made

    onefold.save(folder + "/large", onefold.shard(net(1e6, 1), stage=1), step=1)
    onefold.save(folder + "/complex", onefold.shard(net(1.0, 1j), stage=1), step=1)
    onefold.save(folder + "/float", onefold.shard(net(1.0, 1.5), stage=1), step=1)
    half = onefold.shard(net(1.0, 1), stage=2, precision="fp16")
    real, whole = onefold.shard(net(1.0, 1.0), stage=2), onefold.shard(net(1.0, 1), stage=2)
    return [
        said(onefold.load, folder + "/large", half),
        said(onefold.load, folder + "/large", real),
        said(onefold.load, folder + "/complex", real),
        said(onefold.load, folder + "/float", whole),
    ]


def test_values_that_do_not_fit_are_named(tmp_path):
    first, second = run_ranks(2, misfits, str(tmp_path))
    assert first == second
    large, fits, turned, parted = first
    assert "weight has values too large for torch.float16" in large and fits is None
    assert "count (value) is saved in torch.complex64, which does not fit count in torch.float32" in turned
    assert "count (value) is saved in torch.float32, which does not fit count in torch.int64" in parted


def other_optimizers(folder: str) -> list[str | None]:
    onefold.init()
    model, optimizer = sharded(NamedPair())
    step(model, optimizer)
    onefold.save(folder, model, optimizer, step=1)
    onefold.save(folder + "/weights", model, step=1)
    sgd = onefold.shard(NamedPair(), stage=2)
    its = onefold.Optimizer(sgd, torch.optim.SGD, lr=0.1)
    parted = onefold.shard(NamedPair(), stage=1)
    groups = [{"params": [parted.up.weight, parted.up.bias]}, {"params": [parted.down.weight, parted.down.bias]}]
    two = onefold.Optimizer(parted, torch.optim.AdamW, groups=groups, lr=0.1)
    step(parted, two)
    onefold.save(folder + "/two", parted, two)
    two.param_groups[1]["lr"] = 0.2
    onefold.save(folder + "/differ", parted, two)
    return [
        said(onefold.load, folder, sgd, its),
        said(onefold.load, folder, sgd),
        said(onefold.load, folder + "/weights", model, optimizer),
        said(onefold.load, folder + "/weights", model),
        said(onefold.load, folder, parted, two),  # one group's settings serve both
        said(onefold.load, folder + "/two", model, optimizer),  # nor do two groups of the same settings contradict
        said(onefold.load, folder + "/differ", model, optimizer),
        said(onefold.load, folder, parted, optimizer),
        said(onefold.save, folder, model),
    ]


def test_an_optimizer_takes_the_state_of_its_own_class_and_groups(tmp_path):
    answers = run_ranks(2, other_optimizers, str(tmp_path))
    assert answers[0] == answers[1]
    other, weights, none, only, same_groups, equal, merged, foreign, uncounted = answers[0]
    assert "holds the state of AdamW, this optimizer is SGD" in other and weights is None
    assert "was saved without an optimizer" in none and only is None
    assert same_groups is None and equal is None
    assert "param group 0 has parameters of 2 saved groups" in merged
    assert foreign.startswith("ConfigError") and uncounted.startswith("ConfigError")


def from_meta(folder: str, save: bool) -> dict[str, str]:
    onefold.init()
    torch.manual_seed(dist.get_rank())
    with torch.device("cpu" if save else "meta"):
        net = NamedPair(more=False)
    model, optimizer = sharded(net, stage=3)
    if save:
        step(model, optimizer)
        onefold.save(folder, model, optimizer)
    else:
        onefold.load(folder, model, optimizer)
    return digests(state(model, optimizer))


def test_a_model_built_on_meta_is_filled_from_a_checkpoint(tmp_path):
    wanted = run_ranks(2, from_meta, str(tmp_path), True)[0]
    assert run_ranks(3, from_meta, str(tmp_path), False) == [wanted] * 3


def own_things(folder: str, save: bool) -> tuple[Any, float, Any, int]:
    """Every rank has an extra, random numbers and batch statistics of its own."""
    onefold.init()
    rank = dist.get_rank()
    torch.manual_seed(rank + 10 * (not save))
    model = onefold.shard(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    if save:
        model(torch.randn(4, 3))
        extra: Any = {"rank": rank, "t": torch.tensor([rank])}
        onefold.save(folder, model, optimizer, extra=extra)
        warned: list[Any] = []
    else:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            extra = onefold.load(folder, model, optimizer)
    mean = model[1].running_mean.tolist()
    return {"rank": extra["rank"], "t": extra["t"].item()}, torch.rand(()).item(), mean, len(warned)


def test_what_ranks_have_of_their_own_comes_back_to_them(tmp_path):
    saved = run_ranks(3, own_things, str(tmp_path), True)
    assert len({repr(answer) for answer in saved}) == 3
    assert run_ranks(3, own_things, str(tmp_path), False) == saved


def test_with_other_ranks_all_have_the_firsts_and_new_ones_a_random_state_that_is_always_the_same(tmp_path):
    saved = run_ranks(2, own_things, str(tmp_path), True)
    loaded = run_ranks(4, own_things, str(tmp_path), False)
    assert [answer[0] for answer in loaded] == [saved[0][0]] * 4
    assert [answer[2] for answer in loaded] == [saved[0][2]] * 4
    numbers = [answer[1] for answer in loaded]
    assert numbers[:2] == [answer[1] for answer in saved] and len(set(numbers)) == 4
    assert [answer[1] for answer in run_ranks(4, own_things, str(tmp_path), False)] == numbers
    assert [answer[3] for answer in loaded] == [2, 0, 0, 0]  # one rank says it: random states, and what differed


def accumulate_and_save(folder: str, save: bool) -> torch.dtype:
    onefold.init()
    model = onefold.shard(NamedPair(), stage=2, precision="bf16")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)
    if save:
        with onefold.accumulate(model):
            optimizer.backward(model(torch.ones(2, 6)).square().mean())
        step(model, optimizer)
        onefold.save(folder, model, optimizer)
    else:
        onefold.load(folder, model, optimizer)
    return engine_of(model).units[0].gradients.dtype


def test_gradients_that_accumulated_in_fp32_still_do_after_a_load(tmp_path):
    assert run_ranks(1, accumulate_and_save, str(tmp_path), True) == [torch.float32]
    assert run_ranks(1, accumulate_and_save, str(tmp_path), False) == [torch.float32]


def replicated(folder: str, save: bool) -> tuple[list[str], dict[str, str]]:
    onefold.init()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0 if save else 1)
    model = onefold.shard(NamedPair(), stage=3, mesh=mesh)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)
    if save:
        step(model, optimizer)
        onefold.save(folder, model, optimizer)
    else:
        onefold.load(folder, model, optimizer)
    return sorted(f"{p.name} {p.stat().st_size > 8000}" for p in Path(folder).glob("*/*.safetensors")), digests(
        state(model, optimizer)
    )


def test_of_replicas_only_the_first_writes_and_all_read(tmp_path):
    (files, wanted), *_ = run_ranks(4, replicated, str(tmp_path), True)
    assert len(files) == 4
    assert [found for _, found in run_ranks(4, replicated, str(tmp_path), False)] == [wanted] * 4
    assert run_ranks(2, from_meta, str(tmp_path), False) == [wanted] * 2


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True], 3: (1, (2,)), "big": 2**70},
        [math.inf, -math.inf, {}, [], ()],
        Counter({3: 2}),
        ["list", ["dict", 1]],
    ],
)
def test_plain_values_come_back_as_they_went_in(value):
    tensors: dict[str, Tensor] = {}
    back = decode(encode(value, "extra", tensors), lambda *_: torch.empty(0))
    assert back == value and type(back) is type(value) and repr(back) == repr(value) and tensors == {}


def test_tensors_and_counts_come_back_bit_for_bit():
    tensors: dict[str, Tensor] = {}
    note = encode({"t": torch.arange(3), 1: torch.ones(()), "1": torch.zeros(2, 0)}, "extra", tensors)
    back = decode(note, lambda key, dtype, shape: tensors[key])
    assert list(back) == ["t", 1, "1"] and back[1].shape == () and back["1"].shape == (2, 0)
    for single in (torch.tensor(0.1), torch.tensor(3), torch.tensor(True), torch.tensor(1e-300, dtype=torch.float64)):
        assert same(decode_single(encode_single(single, "step")), single)
    assert math.isnan(decode(encode(math.nan, "x", {}), lambda *_: torch.empty(0)))
