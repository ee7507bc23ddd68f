"""ONEFOLD_RECORDS: when a message does not complete every rank writes where it is, and `onefold doctor` says who."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold.cli.main import main
from onefold.comm.hang_record import RECORDS, Call, HangRecord, LinkRecord
from onefold.observe.hang import explain, read_record
from tests.harness import start_ranks, tell

RANKS, LATE = 3, 1
TIMEOUT_S = 2.0
ENOUGH_S = 40.0  # for records to be written, on a busy machine


def wait_for_records(folder: Path, ranks: tuple[int, ...]) -> None:
    """A loop of the user's own, in which a late rank is found."""
    until_s = time.monotonic() + ENOUGH_S
    while not all((folder / f"rank-{rank}.json").exists() for rank in ranks) and time.monotonic() < until_s:
        time.sleep(0.01)


def hang(folder: str, fault: str) -> None:
    """Rank 1 does not come to the second step."""
    onefold.init()
    model = onefold.shard(nn.Linear(8, 8), stage=2, timeout_s=TIMEOUT_S)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    survivors = tuple(rank for rank in range(RANKS) if fault != "stopped" or rank != LATE)
    for step in range(2):
        if step == 1 and dist.get_rank() == LATE:
            tell("late")
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            wait_for_records(Path(folder), survivors)
            os._exit(0)
        try:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        except onefold.CommError:
            wait_for_records(Path(folder), survivors)
            raise


@pytest.mark.parametrize("fault", ["late", "stopped"])
def test_three_lines_name_the_rank_behind_a_hang(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "records"
    with start_ranks(RANKS, hang, str(folder), fault, env={RECORDS: str(folder)}, timeout_s=90, init=False) as group:
        assert group.message(LATE) == "late"
        for rank in (0, 2):
            with pytest.raises(Exception, match="CommError"):
                group.message(rank)
        group.kill(LATE)
        group.join()
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank-{rank}.json" for rank in range(RANKS) if fault != "stopped" or rank != LATE
    ]
    assert main(["doctor", str(tmp_path)]) == 0
    found, behind, others = capsys.readouterr().out.splitlines()
    assert found.startswith("found: ") and "rank 1" in found
    if fault == "late":
        assert behind.startswith("behind it: rank 1 (") and "it is in wait_for_records (" in behind
        assert "test_hang_records.py" in behind and "time.sleep(0.01)" in behind
    else:
        assert behind.startswith("behind it: rank 1 has written no record: it has ended or is stopped; ")
    assert "rank 0 (" in others and "rank 2 (" in others and "memory: resident " in others
    assert main(["doctor", str(folder), "--json"]) == 0
    assert [record["rank"] for record in json.loads(capsys.readouterr().out)] == [
        record.rank for record in map(read_record, sorted(folder.iterdir()))
    ]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 1 << 40)
records = st.builds(
    HangRecord, numbers, numbers, texts, numbers, st.floats(0, 1e10), texts,
    st.lists(
        st.builds(
            LinkRecord, texts, st.lists(numbers).map(tuple), numbers, texts,
            st.lists(st.tuples(numbers, texts, st.floats(0, 1e5))).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    st.dictionaries(texts, st.lists(st.builds(Call, texts, numbers, texts, texts), max_size=3).map(tuple), max_size=3),
    numbers, numbers,
)  # fmt: skip


@given(records)
def test_a_record_is_read_as_it_was_written_and_always_explained(tmp_path_factory, record: HangRecord) -> None:
    folder = tmp_path_factory.mktemp("records")
    record.write(folder)
    (path,) = folder.iterdir()
    assert read_record(path) == record
    lines = explain([read_record(path)])
    assert [line.split(":")[0] for line in lines] == ["found", "behind it", "the others"]


def blamed(message: str, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    assert main(["doctor", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_what_is_no_record_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "has no records of a hang" in capsys.readouterr().err
    record = asdict(HangRecord(0, 1, "", 1, 0.0, "", (), {}, 0, 0))
    for text in ("", "[]", "{}", "null", json.dumps(record | {"more": 1}), json.dumps(record | {"links": [[1]]})):
        blamed("rank-0.json", tmp_path, text, capsys)
