"""Whatever becomes of block inputs, training gives the same bits: at every stage, dropout included."""

from __future__ import annotations

import pytest

from tests.activations.runs import HOSTLESS, SHARED, train
from tests.harness import run_ranks
from tests.harness.grids import with_soak

STAGES = (0, 1, 2, 3)


def digests(policies: tuple[str, ...], stages: tuple[int, ...], same_batch: bool, **fields) -> dict[str, set[str]]:
    return {policy: {train(policy, stage, same_batch, **fields).digest for stage in stages} for policy in policies}


@pytest.mark.parametrize("fields", with_soak([{}, {"shared": True, "checkpoint_every": 2}, {"micro": 2}], {}))
def test_recomputed_blocks_train_to_the_bits_of_kept_ones_at_every_stage(fields: dict) -> None:
    every = fields.pop("checkpoint_every", None)
    by_rank = run_ranks(2, digests, ("keep",), STAGES, False, **fields)
    fields |= {"checkpoint_every": every} if every else {}
    again = run_ranks(2, digests, HOSTLESS[1:], STAGES, False, **fields)
    for kept, found in zip(by_rank, again, strict=True):
        assert len(kept["keep"]) == 1
        assert found == dict.fromkeys(HOSTLESS[1:], kept["keep"])


@pytest.mark.parametrize("fields", [{}, {"shared": True}, {"micro": 2, "precision": "bf16"}])
def test_shared_inputs_train_to_the_same_bits(fields: dict) -> None:
    """Along the axis tp nothing else is shared, so each rank trains as if alone, at any stage."""
    (alone,) = run_ranks(1, digests, ("keep", "checkpoint"), (2,), True, **fields)
    assert len(set.union(*alone.values())) == 1
    for found in run_ranks(2, digests, SHARED, (2,), True, **fields):
        assert found == dict.fromkeys(SHARED, alone["keep"])


def both_axes(policy: str) -> set[str]:
    """On four ranks: two that share states, two along tp with the same batch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    place = mesh.get_local_rank("shard")
    assert place == dist.get_rank() // 2
    return {train(policy, stage, True, mesh=mesh).digest for stage in (1, 3)}


def test_inputs_are_shared_along_tp_while_states_are_sharded_along_shard() -> None:
    kept = run_ranks(4, both_axes, "keep")
    assert len(kept[0]) == 1
    for policy in SHARED:
        assert run_ranks(4, both_axes, policy) == kept
