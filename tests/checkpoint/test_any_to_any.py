"""What one cluster wrote, another reads: the same bits at any number of ranks, any stage and any precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.runtime.engine import engine_of
from onefold.state.rounding import narrowed
from tests.checkpoint.runs import PRECISIONS, Case, Trainer, differing, read, same, write
from tests.harness import run_ranks
from tests.harness.grids import with_soak

RANKS = (1, 2, 3, 4)
NAMES = list(PRECISIONS)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[tuple[int, Case], tuple[str, dict[str, str]]]:
    """For every number of ranks and stage, one precision each such that all occur: its folder and its state."""
    found = {}
    for ranks in RANKS:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        cases = [Case(stage, NAMES[(ranks + stage) % 4]) for stage in range(4)]
        per_rank = run_ranks(ranks, write, cases, str(folder))
        assert all(answer == per_rank[0] for answer in per_rank)
        for case, state in zip(cases, per_rank[0], strict=True):
            found[ranks, case] = (str(folder / f"{case.stage}-{case.precision}"), state)
    return found


@pytest.mark.parametrize("ranks", with_soak(RANKS, 1, 4))
def test_every_rank_count_and_stage_reads_every_other_bitwise(ranks, written):
    """From each of the 16 to one stage: all pairs of rank counts, and here all pairs of stages and of precisions."""
    pairs = pairs_of(written, lambda before, stage: [(stage + before + ranks) % 4])
    assert len(pairs) == 16
    assert len({(case.stage, source.stage) for case, _, source, _, _ in pairs}) == 16
    assert len({(case.precision, source.precision) for case, _, source, _, _ in pairs}) == 16
    assert_all_read(ranks, pairs)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_count_reads_every_other_at_every_pair_of_stages_bitwise(ranks, written):
    pairs = pairs_of(written, lambda before, stage: range(4))
    assert len(pairs) == 64
    assert_all_read(ranks, pairs)


def pairs_of(written: Any, stages: Callable[[int, int], Iterable[int]]) -> list[tuple[Case, int, Case, str, Any]]:
    """What is read, and from where: from the ranks and stage of the writer to the stages of the reader."""
    return [
        (Case(stage, NAMES[(source.stage + stage) % 4]), before, source, folder, state)
        for (before, source), (folder, state) in written.items()
        for stage in stages(before, source.stage)
    ]


def assert_all_read(ranks: int, pairs: list[tuple[Case, int, Case, str, Any]]) -> None:
    answers = run_ranks(ranks, read, [(case, folder) for case, _, _, folder, _ in pairs])
    for rank, answer in enumerate(answers):
        for (case, before, source, _, state), (found, stale) in zip(pairs, answer, strict=True):
            where = f"rank {rank} of {ranks}, {case}, from {before} ranks, {source}"
            assert differing(found, state) == [], where
            assert stale == [], where


def frozen(folder: str, save: str | None, precision: str) -> torch.Tensor:
    onefold.init()
    trainer = Trainer(Case(3, precision), seed=0 if save else 1)
    onefold.save(folder, trainer.model, step=1) if save else onefold.load(folder, trainer.model)
    with onefold.full_parameters(trainer.model):
        return trainer.model.fixed.weight.detach().clone()


def test_frozen_parameters_keep_the_dtype_they_compute_in(tmp_path):
    """They have no master: 16 bits are all there is of them. Into fp32 they go exactly, into 16 bits rounded."""
    for before, after in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")):
        folder = str(tmp_path / f"{before}-{after}")
        was = run_ranks(2, frozen, folder, "save", before)[0]
        now = run_ranks(2, frozen, folder, None, after)[1]
        assert same(now, narrowed(was, now.dtype)), (before, after)


def files(cases: list[Case], folder: str) -> list[dict[str, bytes]]:
    onefold.init()
    found = []
    for case in cases:
        path = Trainer(case).train(2).save(f"{folder}/{case.stage}")
        found.append({file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))})
    return found


def test_the_files_of_all_stages_are_identical(tmp_path):
    first, *others = run_ranks(2, files, [Case(stage, "fp32") for stage in range(4)], str(tmp_path))[0]
    assert len(first) == 2
    assert all(other == first for other in others)


def bytes_read(folder: str, stage: int) -> tuple[int, int]:
    """Of parameters and optimizer state, and how much of those this rank keeps."""
    onefold.init()
    trainer = Trainer(Case(stage, "fp32"))
    reads = []
    from onefold.checkpoint.format import reading  # counts, and reads all the same

    read = reading.Checkpoint.read_entry
    try:
        reading.Checkpoint.read_entry = lambda self, entry, part, out: (
            reads.append(out.nbytes * (self.record_of(entry).kind == "trained")),
            read(self, entry, part, out),
        )[1]
        trainer.load(folder)
    finally:
        reading.Checkpoint.read_entry = read
    engine = engine_of(trainer.model)
    kept = sum(4 * slot.span.clip(u.master.owned).numel for u in engine.units for slot in u.layout.slots)
    states = sum(4 * t.numel() for t in trainer.optimizer.state_tensors() if t.ndim)
    return sum(reads), kept + states


def test_a_rank_reads_only_what_it_keeps(tmp_path):
    run_ranks(2, write, [Case(2, "fp32")], str(tmp_path))
    for ranks, stage in ((4, 3), (4, 1), (3, 2)):
        for found, kept in run_ranks(ranks, bytes_read, str(tmp_path / "2-fp32"), stage):
            assert 0 < found <= kept + 64 * 4 * 20  # padding is kept and not read; strides that differ are not here


def other_order(folder: str, save: bool) -> torch.Tensor:
    """A convolution saved with channels last is read by one without."""
    onefold.init()
    torch.manual_seed(0 if save else 1)
    conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    model = onefold.shard(conv.to(memory_format=torch.channels_last) if save else conv, stage=3)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)
    optimizer.backward(model(torch.randn(1, 3, 5, 5)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if save:
        onefold.save(folder, model, optimizer)
    else:
        onefold.load(folder, model, optimizer)
    with onefold.full_parameters(model):
        return model.weight.detach().clone().contiguous()


def test_memory_order_of_the_reader_need_not_be_the_writers(tmp_path):
    wanted = run_ranks(2, other_order, str(tmp_path), True)[0]
    assert all(same(found, wanted) for found in run_ranks(3, other_order, str(tmp_path), False))


def test_a_manifest_is_json_that_anyone_reads(tmp_path):
    run_ranks(2, write, [Case(1, "bf16")], str(tmp_path))
    manifest = json.loads(Path(tmp_path, "1-bf16", "step-00000003", "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["ranks"] == 2
