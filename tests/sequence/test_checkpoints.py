"""A checkpoint of a mesh that cuts sequences is loaded by one that does not, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import onefold
from tests.harness import run_ranks
from tests.parity.training import same_bits
from tests.sequence.runs import IGNORED, Run, batch_of, built, turn

CUT, PLAIN = Run(stage=3), Run(axes=(("shard", 2),), stage=2)


def go_on(folder: str) -> list[dict[str, Any]]:
    """On a rank: parameters as they were saved by each mesh, as the other loads them, and after a step of both."""
    torch.set_num_threads(1)
    meshes = {CUT: onefold.mesh(sequence=2), PLAIN: onefold.mesh(shard=2)}
    found = []
    for saved, loaded in ((CUT, PLAIN), (PLAIN, CUT)):
        model, optimizer = built(saved, meshes[saved])
        turn(saved, model, optimizer, meshes[saved], 0)
        path = Path(folder) / saved.axes[0][0]
        onefold.save(path, model, optimizer)
        other, its_optimizer = built(loaded, meshes[loaded])
        onefold.load(path, other, its_optimizer)
        before = onefold.full_state_dict(model), onefold.full_state_dict(other)
        for one, by, mesh in ((model, optimizer, meshes[saved]), (other, its_optimizer, meshes[loaded])):
            turn(CUT, one, by, meshes[CUT], 1) if mesh is meshes[CUT] else whole_turn(one, by, mesh)
        found.append({"before": before, "after": (onefold.full_state_dict(model), onefold.full_state_dict(other))})
    return found


def whole_turn(model: Any, optimizer: onefold.Optimizer, mesh: Any) -> None:
    """The batch of the cut run, whole, on both ranks."""
    batch = onefold.cut_sequence(batch_of("plain", 1, 0), mesh)
    loss = model(**batch) / (batch["shift_labels"] != IGNORED).sum()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def test_checkpoints_go_between_meshes_with_and_without_cut_sequences(tmp_path: Path) -> None:
    for one in run_ranks(2, go_on, str(tmp_path))[0]:
        saved, loaded = one["before"]
        assert saved and all(same_bits(value, loaded[name]) for name, value in saved.items())
        for name, value in one["after"][0].items():
            torch.testing.assert_close(one["after"][1][name], value, rtol=1e-5, atol=1e-6)
