"""A model on the meta device, split there, gets the values it would have had unsplit: the same at any tp."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onefold
from onefold.train.run.model import GPT, initialise
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import run_ranks
from tests.parity.training import same_bits
from tests.tensor.runs import SHAPE, fresh, stream_of, tokens

FILL = partial(initialise, layers=SHAPE.layers)


def fill(module: nn.Module) -> None:
    """initialise() leaves norms to themselves."""
    FILL(module)


def built(shard: int, tp: int, stage: int, sequence: bool = False, init: object = fill) -> dict[str, Tensor]:
    mesh = onefold.mesh(shard=shard, tp=tp)
    with torch.device("meta"):
        model = parallelize(GPT(SHAPE), mesh, sequence)
    onefold.shard(model, stage=stage, mesh=mesh, init=init, seed=3, bucket_bytes=8 << 10)
    state = onefold.full_state_dict(model)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    model(*tokens(0, 0, stream_of(mesh))).backward()
    optimizer.step()
    return state


@pytest.mark.parametrize(("shard", "tp", "stage", "sequence"), [(1, 2, 0, True), (2, 2, 3, False), (1, 4, 2, False)])
def test_the_same_seed_gives_the_same_values_at_any_tp(shard: int, tp: int, stage: int, sequence: bool) -> None:
    wanted = run_ranks(1, built, 1, 1, 0)[0]
    assert float(wanted["wte.weight"].std()) == pytest.approx(0.02, rel=0.1)
    found = run_ranks(shard * tp, built, shard, tp, stage, sequence)[0]
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not same_bits(found[name], value)] == []


def test_whole_tensors_of_a_file_are_cut(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in fresh().state_dict().items()}
    save_file(state, tmp_path / "gpt.safetensors")
    found = run_ranks(4, built, 2, 2, 3, init=str(tmp_path / "gpt.safetensors"))[0]
    assert all(same_bits(found[name], value) for name, value in state.items())
