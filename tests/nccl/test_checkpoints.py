"""What two NCCL ranks wrote, four read, at any stage and precision, and back: the same bits."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.runs import Case, Trainer, differing, fingerprint, read, write
from tests.nccl.ranks import MARKS, run_nccl

pytestmark = MARKS
SAVED = [Case(0, "fp32"), Case(2, "bf16"), Case(3, "split"), Case(3, "fp16")]


def folder_of(folder: Path, case: Case) -> str:
    return str(folder / f"{case.stage}-{case.precision}")


def test_checkpoints_of_two_ranks_are_read_by_four_at_other_stages_and_precisions(tmp_path: Path) -> None:
    written = run_nccl(2, write, SAVED, str(tmp_path))
    assert written[0] == written[1]
    loads = [
        (Case(stage, source.precision if stage % 2 else SAVED[stage].precision), folder_of(tmp_path, source), state)
        for source, state in zip(SAVED, written[0], strict=True)
        for stage in range(4)
    ]
    for rank, answer in enumerate(run_nccl(4, read, [(case, folder) for case, folder, _ in loads])):
        for (case, folder, state), (found, stale) in zip(loads, answer, strict=True):
            assert differing(found, state) == [], (rank, case, folder)
            assert stale == [], (rank, case, folder)


def uninterrupted(case: Case) -> dict[str, object]:
    return fingerprint(Trainer(case).train(4))


def first_half(case: Case, folder: str) -> None:
    Trainer(case).train(2).save(folder)


def passed_on(case: Case, folder: str, target: str) -> None:
    Trainer(case, seed=3).load(folder).save(target)


def second_half(case: Case, folder: str) -> dict[str, object]:
    return fingerprint(Trainer(case, seed=5).load(folder).train(2))


def test_a_run_that_four_ranks_loaded_and_saved_goes_on_with_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    wanted = run_nccl(2, uninterrupted, Case(2, "bf16"))
    run_nccl(2, first_half, Case(2, "bf16"), str(tmp_path / "two"))
    run_nccl(4, passed_on, Case(3, "bf16"), str(tmp_path / "two"), str(tmp_path / "four"))
    found = run_nccl(2, second_half, Case(3, "bf16"), str(tmp_path / "four"))
    for rank in range(2):
        state = [name for name in differing(found[rank], wanted[rank]) if "|" in name or "." in name]
        assert state == [], f"rank {rank}"
