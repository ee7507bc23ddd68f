"""What any mesh saved, any other reads: exact values and moments, whole tensors out. Each element is stored once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import onefold
from onefold.checkpoint.format.manifest import Manifest
from onefold.cost.layout import Span
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.settings.placement import Scope
from onefold.train.run.model import GPT
from tests.harness import run_ranks, run_ranks_raises
from tests.models import NoSplitDim
from tests.parity.training import same_bits
from tests.tensor.runs import Run, built, stream_of, turn

MESHES = [(1, 2, 0), (2, 1, 3), (2, 2, 3), (4, 1, 2), (1, 4, 1)]  # shard, tp, stage


class State(NamedTuple):
    """Of the first rank: whole values and whole moments."""

    values: dict[str, Tensor]
    moments: dict[str, Tensor]


@torch.no_grad()
def look(model: GPT, optimizer: onefold.Optimizer) -> State:
    """The moments stand in for the values for a while, and are gathered as those are: no checkpoint code takes part."""
    values = onefold.full_state_dict(model)
    before = [one.unit.flat_params.part(one.unit.mine).clone() for one in optimizer.by_unit]
    place(optimizer, [list(momenta(one)) for one in optimizer.by_unit])
    moments = onefold.full_state_dict(model)
    place(optimizer, [[(one.unit.mine, old)] for one, old in zip(optimizer.by_unit, before, strict=True)])
    return State(values, moments)


def momenta(one: UnitOptimizer) -> Iterator[tuple[Span, Tensor]]:
    for piece in one.optimizer_params():
        assert one.inner is not None
        yield piece.span, one.inner.state[piece.tensor]["momentum_buffer"]


def place(optimizer: onefold.Optimizer, new: list[list[tuple[Span, Tensor]]]) -> None:
    for one, pieces in zip(optimizer.by_unit, new, strict=True):
        values = one.unit.flat_params
        values.finish_posted()
        for span, tensor in pieces:
            values.part(span).copy_(tensor)
        if values.scope is Scope.REPLICATED:
            values.gather_updated().wait()


def write(cases: list[tuple[Run, str]]) -> list[State]:
    found = []
    for run, folder in cases:
        mesh = onefold.mesh(shard=run.shard, tp=run.tp)
        model, optimizer = built(run, mesh)
        for step in range(2):
            turn(run, model, optimizer, step, stream_of(mesh))
        onefold.save(folder, model, optimizer, extra={"tokens": 7})
        found.append(look(model, optimizer))
    return found


def read(cases: list[tuple[Run, str]]) -> list[State]:
    found = []
    for run, folder in cases:
        mesh = onefold.mesh(shard=run.shard, tp=run.tp)
        model, optimizer = built(run, mesh, seed=5)
        assert onefold.load(folder, model, optimizer) == {"tokens": 7}
        found.append(look(model, optimizer))
    return found


def folder_of(run: Run, root: Path) -> str:
    return str(root / f"{run.shard}x{run.tp}")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Run, State]]:
    root = tmp_path_factory.mktemp("meshes")
    found: dict[Run, State] = {}
    for ranks in (2, 4):
        runs = [Run(s, t, stage, sequence=t == 4) for s, t, stage in MESHES if s * t == ranks]
        found |= dict(zip(runs, run_ranks(ranks, write, [(run, folder_of(run, root)) for run in runs])[0]))
    return root, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mesh_reads_what_every_other_wrote(ranks: int, written: tuple[Path, dict[Run, State]]) -> None:
    root, states = written
    runs = [Run(s, t, stage) for s, t, stage in MESHES if s * t == ranks]
    cases = [(run, source) for run in runs for source in states]
    found = run_ranks(ranks, read, [(run, folder_of(source, root)) for run, source in cases])[0]
    for (run, source), state in zip(cases, found, strict=True):
        wanted, where = states[source], f"{source} read by {run}"
        assert state.values.keys() == wanted.values.keys()
        for name, value in wanted.values.items():
            assert same_bits(state.values[name], value), f"{where}: {name}"
            assert same_bits(state.moments[name], wanted.moments[name]), f"{where}: moments of {name}"
        assert not torch.equal(wanted.moments["wte.weight"], wanted.values["wte.weight"])


def from_8bit(folder: str) -> list[dict[str, Tensor]]:
    """Whole moments in fp32, read without and with tensor parallelism from what was saved in 8 bits."""
    mesh = onefold.mesh(shard=2)
    model, optimizer = built(Run(2, 1, 3), mesh, state="8bit")
    turn(Run(2, 1, 3), model, optimizer, 0, stream_of(mesh))
    onefold.save(folder, model, optimizer, extra={"tokens": 7})
    return [state.moments for state in read([(Run(2, 1, 3), folder), (Run(1, 2, 0), folder)])]


def test_moments_in_8_bits_are_read_by_ranks_that_split_tensors(tmp_path: Path) -> None:
    whole, split = run_ranks(2, from_8bit, str(tmp_path))[0]
    assert whole.keys() == split.keys() and all(same_bits(split[name], moment) for name, moment in whole.items())
    assert all(moment.any() for moment in whole.values())


def test_each_element_is_stored_once_and_exported_whole(written: tuple[Path, dict[Run, State]], tmp_path: Path) -> None:
    root, states = written
    for run, state in states.items():
        folder = Path(folder_of(run, root))
        manifest = Manifest.from_json((folder / "step-00000002" / "manifest.json").read_bytes(), "it")
        numel = sum(value.numel() for value in state.values.values())
        trained = {record.name for record in manifest.records if record.kind == "trained"}
        assert trained == set(state.values)
        stored = sum(e.stop - e.start for e in manifest.entries if e.state == "value" and e.name in trained)
        assert stored == numel
        onefold.export(folder, tmp_path / folder.name)
        weights = load_file(tmp_path / folder.name / "model.safetensors")
        assert all(same_bits(weights[name], value) for name, value in state.values.items())


def resume(run: Run, folder: str, save_at: int | None) -> list[Tensor]:
    """Norms of four steps, the last two after a restart, or without one."""
    mesh = onefold.mesh(shard=run.shard, tp=run.tp)
    model, optimizer = built(run, mesh)
    norms = []
    for step in range(4):
        if step == save_at:
            onefold.save(folder, model, optimizer)
            model, optimizer = built(run, mesh, seed=9)
            onefold.load(folder, model, optimizer)
        norms.append(turn(run, model, optimizer, step, stream_of(mesh))[1])
    return norms


def test_a_run_on_the_same_mesh_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = Run(2, 2, stage=3, sequence=True)
    straight = run_ranks(4, resume, run, str(tmp_path), None)[0]
    assert all(map(same_bits, run_ranks(4, resume, run, str(tmp_path), 2)[3], straight))


def load_weights(run: Run, folder: str) -> dict[str, Tensor]:
    model, _ = built(run, onefold.mesh(shard=run.shard, tp=run.tp), seed=3)
    onefold.load(folder, model)
    return onefold.full_state_dict(model)


def test_weights_of_others_are_split_as_they_are_read(written: tuple[Path, dict[Run, State]], tmp_path: Path) -> None:
    root, states = written
    source = next(iter(states))
    onefold.export(folder_of(source, root), tmp_path / "weights")
    found = run_ranks(4, load_weights, Run(2, 2, stage=2), str(tmp_path / "weights"))[0]
    assert all(same_bits(found[name], value) for name, value in states[source].values.items())


def random_after_load(run: Run, folder: str, save: bool) -> float:
    mesh = onefold.mesh(shard=run.shard, tp=run.tp)
    model, optimizer = built(run, mesh)
    torch.manual_seed(50 + stream_of(mesh))
    if save:
        turn(run, model, optimizer, 0, stream_of(mesh))
        onefold.save(folder, model, optimizer)
    else:
        onefold.load(folder, model, optimizer)
    return torch.rand(()).item()


def test_ranks_that_share_tensors_share_random_numbers_after_any_change_of_mesh(tmp_path: Path) -> None:
    """Dropout must fall alike on them."""
    saved = run_ranks(4, random_after_load, Run(4, 1), str(tmp_path), True)
    assert len(set(saved)) == 4
    found = run_ranks(4, random_after_load, Run(2, 2), str(tmp_path), False)
    assert found == [saved[0], saved[0], saved[1], saved[1]]


def save_unsaid(folder: str) -> None:
    model = onefold.shard(NoSplitDim(), stage=1, mesh=onefold.mesh(shard=1, tp=2))
    onefold.save(folder, model, step=0)


def test_a_part_of_an_unknown_whole_is_not_saved(tmp_path: Path) -> None:
    for error in run_ranks_raises(2, save_unsaid, str(tmp_path)):
        assert error.type_name == "StateError" and "partition_dim" in error.message and "weight" in error.message
