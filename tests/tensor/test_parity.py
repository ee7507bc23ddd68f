"""dp × tp equals one process, and every stage equals every other to the last bit on the same mesh."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.training import same_bits
from tests.tensor.runs import Run, Trained, alone, mean_losses, train

MESHES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]


def stages_of(run: Run) -> tuple[int, ...]:
    """Where nobody shares state, all stages are the same program: two of them tell."""
    return (0, 1, 2, 3) if run.shard > 1 else (0, 3)


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-4, atol=2e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


def assert_all_stages(run: Run, trained: list[list[Trained]], wanted: Trained) -> None:
    """`trained` is by rank, then by stage."""
    first = trained[0][0]
    assert_near(first.params, wanted.params)
    torch.testing.assert_close(torch.stack(first.norms), torch.stack(wanted.norms), rtol=1e-5, atol=1e-6)
    for number, stage in enumerate(stages_of(run)):
        by_rank = [rank[number] for rank in trained]
        assert mean_losses(by_rank, run) == pytest.approx(wanted.losses, rel=1e-5)
        differing = [name for name, value in by_rank[0].params.items() if not same_bits(value, first.params[name])]
        assert differing == [], f"stage {stage}"
        for rank, one in enumerate(by_rank):
            assert all(map(same_bits, one.norms, first.norms)), f"stage {stage}, rank {rank}"
            assert one.losses == trained[rank][0].losses, f"stage {stage}, rank {rank}"


@pytest.mark.parametrize(("shard", "tp"), MESHES)
def test_every_mesh_and_stage_trains_as_one_process_does(shard: int, tp: int) -> None:
    """Split and whole parameters, a tied vocabulary that tp does not divide, clipping that bites."""
    run = Run(shard, tp)
    wanted = alone(shard)
    assert min(wanted.norms) > run.clip
    assert_all_stages(run, run_ranks(run.ranks, train, [run.at(stage) for stage in stages_of(run)]), wanted)


@pytest.mark.parametrize(("shard", "tp"), [(1, 2), (2, 2), (1, 4)])
def test_sequence_parallelism_trains_as_one_process_does(shard: int, tp: int) -> None:
    """The gradients of its norms arrive as partial sums."""
    run = Run(shard, tp, sequence=True, steps=2)
    trained = run_ranks(run.ranks, train, [run.at(stage) for stage in stages_of(run)])
    assert_all_stages(run, trained, alone(shard, steps=2))
    assert all(one.sent["tp-gradient"] > 0 for rank in trained for one in rank)


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_micro_batches_accumulate(reduce: str) -> None:
    run = Run(2, 2, micro=2, reduce=reduce, steps=2)
    assert_all_stages(run, run_ranks(4, train, [run.at(stage) for stage in stages_of(run)]), alone(2, micro=2, steps=2))
