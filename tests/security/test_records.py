"""Run folders that someone made up: any figures of any type are a page or one line, in little memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold.cli.report import _strict
from onefold.errors import OnefoldError
from onefold.settings.limited import JSON_BYTES_LIMIT, LINE_BYTES_LIMIT, LINES_BYTES_LIMIT, read_bytes
from onefold.train.report import sections
from onefold.train.report.comparison import _runs, _table, best, cards, lead, lowest
from onefold.train.report.figures import Run, agreement, headline, read_run
from onefold.train.report.report import reported
from onefold.train.run.toml import read_toml
from tests.checkpoint.test_hostile import places
from tests.security.others import no_longer_than, one_line, run_here
from tests.train.written import write_profile, write_run

ODD: list[Any] = [
    None, True, -1, 0, 10**4000, -(10**400), 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", [],
    {}, [[]], {"": []}, [1] * 3, {"step": 1}, 1e-320, "9" * 5000, {"x": {"y": {}}}, 2**53, -0.0,
]  # fmt: skip
FILES = ("facts.json", "metrics.jsonl", "warnings.jsonl", "profile/summary.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=4)
    write_profile(tmp_path / "run")
    return tmp_path / "run"


def read(run: Path) -> dict[str, Any]:
    texts = {name: (run / name).read_text() for name in FILES}
    return {name: [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
            for name, text in texts.items()}  # fmt: skip


def write(run: Path, told: dict[str, Any]) -> None:
    for name, value in told.items():
        rows = value if name.endswith("l") and isinstance(value, list) else [value]
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def every_word(run: Run) -> None:
    """All of both pages that is made without drawing."""
    sections.lead(run), sections.cards(headline(run)), sections.kicker("x", run)
    for part in (sections.placement, sections.warnings, sections.environment, sections.settings, sections.profile):
        part(run)
    sections.memory(run, None), sections.traffic(run, None), sections.progress(run, {})
    together = agreement([run, run])
    lead([run, run], together), cards([run, run], together), _table([run, run]), _runs([run], [run.folder.name])
    best([run, run]), lowest([run, run]), run.clock("loss")
    json.dumps(_strict(headline(run)._asdict()))


def test_a_run_changed_anywhere_at_random_is_a_page_or_one_line(run):
    """No change makes it raise anything but the named error, and most changes do no harm."""
    rng, before = random.Random(0), read(run)
    refused = 0
    for _ in range(300):
        told = json.loads(json.dumps(before))
        for _ in range(rng.choice((1, 1, 3))):
            place, key = rng.choice(list(places(told)))
            place[key] = rng.choice(ODD)
        try:
            write(run, told)
        except ValueError:  # our own writer refuses numbers that Python does not print
            continue
        try:
            every_word(read_run(run))
        except OnefoldError as error:
            assert str(run) in str(error) and "\n" not in str(error)
            refused += 1
    assert 20 < refused < 280


@pytest.mark.parametrize("shift", [0, 4])
def test_charts_of_odd_figures_are_drawn_or_left_out(run, shift, recwarn):
    odd = [1e308, 10**99, float("nan"), float("inf"), -float("inf"), -1, 1e-320, "x"]
    told = read(run)
    for number, row in enumerate(told["metrics.jsonl"]):
        for place, key in enumerate(sorted(row.keys() - {"step"})):
            value = odd[(place + shift + (number == 3)) % len(odd)]
            row[key] = dict.fromkeys(row[key], value) if isinstance(row[key], dict) else value
    told["facts.json"]["baseline"]["bigram_val_loss"] = odd[shift]
    told["facts.json"]["plan"]["traffic"] = {"x": odd[shift + 1]}
    write(run, told)
    charts, page = reported(read_run(run))
    assert len(charts) >= 3 and page.endswith("</html>\n") and not recwarn.list


TEXTS: dict[str, bytes] = {
    "nested": b"[" * 200_000,
    "nested in objects": b'{"a":' * 100_000,
    "a number without end": b"9" * 100_000,
    "no text": bytes(range(256)),
    "nothing": b"",
    "a string": b'"facts"',
    "cut short": b'{"model": {',
    "two": b"{} {}",
    "UTF-16": "{}".encode("utf-16"),
    "model is a list": b'{"model": []}',
    "plan is a number": b'{"plan": 1}',
    "environment is a string": b'{"environment": "x"}',
}


@pytest.mark.parametrize("case", TEXTS)
def test_facts_that_are_none_are_one_line(run, case):
    (run / "facts.json").write_bytes(TEXTS[case])
    for verb in ("report", "sample"):
        assert one_line(run_here(verb, run), "facts.json")


@pytest.mark.parametrize("case", [case for case in TEXTS if " is " not in case and case != "nothing"])
def test_lines_and_profiles_that_are_none_are_one_line(run, case):
    for name in ("metrics.jsonl", "warnings.jsonl", "profile/summary.json"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(TEXTS[case] + b"\n")
        if name.endswith("l") and case == "a string":  # a row that is no object says nothing
            read_run(run)
        else:
            assert one_line(run_here("report", run), Path(name).name)
        (run / name).write_bytes(before)


@pytest.mark.parametrize(
    "text", [b"a = " + b"[" * 100_000, b"\xff", b"a = 1\na = 2", b"a" * (2 << 20), b"x = " + b"9" * 9000, b"a.b = 1"]
)
def test_settings_that_are_none_are_one_line(tmp_path, text):
    (tmp_path / "config.toml").write_bytes(text)
    assert one_line(run_here("train", "--config", tmp_path / "config.toml"), "config.toml")


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(OnefoldError) as refused, no_longer_than(60):
            act()
        assert "\n" not in str(refused.value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [*FILES, "config.toml"])
def test_a_file_of_any_size_costs_little_memory(run, name):
    with open(run / name, "r+b") as file:
        file.truncate(1 << 40)  # sparse: its zeros take no disk
    assert peak_bytes(lambda: read_run(run)) < 1 << 20
    assert one_line(run_here("report", run), Path(name).name, "at most")


def test_a_line_without_end_costs_little_memory(run):
    with open(run / "metrics.jsonl", "wb") as file:
        file.truncate(LINES_BYTES_LIMIT)
    assert peak_bytes(lambda: read_run(run)) < 4 * LINE_BYTES_LIMIT
    assert one_line(run_here("report", run), "line 1 of", "metrics.jsonl has more than")


def test_a_config_of_any_size_costs_little_memory(tmp_path):
    with open(tmp_path / "config.toml", "wb") as file:
        file.truncate(1 << 40)
    assert peak_bytes(lambda: read_toml(tmp_path / "config.toml")) < 1 << 20


def test_a_file_that_grows_while_it_is_read_is_not_read_without_end():
    """/proc files say that they have 0 bytes."""
    assert JSON_BYTES_LIMIT > 1
    with pytest.raises(OnefoldError, match="grew beyond 100 bytes while it was read"):
        read_bytes(Path("/proc/self/maps"), 100)


def test_a_profile_of_no_steps_or_no_time_is_one_line(run):
    before = json.loads((run / "profile" / "summary.json").read_text())
    changes: list[Callable[[Any], None]] = [
        lambda rank: rank.update(steps=[]), lambda rank: rank["steps"][0].update(wall_ns=0),
        lambda rank: rank["steps"][0]["parts_ns"].update(forward="x"), lambda rank: rank.update(more=1),
        lambda rank: rank["steps"][0].update(exposed_ns={"u": 3}), lambda rank: rank["steps"][0].update(wall_ns=10**30),
    ]  # fmt: skip
    for change in changes:
        told = json.loads(json.dumps(before))
        change(told[0])
        (run / "profile" / "summary.json").write_text(json.dumps(told))
        assert one_line(run_here("report", run), "summary.json cannot be read as the figures of a profile")


def test_a_model_of_made_up_size_is_refused_before_it_is_built(run):
    """facts.json says how large the model is; the checkpoint knows."""
    from onefold.checkpoint.format.storage import Storage
    from tests.checkpoint.drive import save

    save(Storage(), run / "checkpoints", 1)
    facts = json.loads((run / "facts.json").read_text())
    for size in ({"layers": 10**9}, {"hidden": 2**40}, {"vocab": 10**15}, {"seq": 10**15}):
        facts["model"] |= size
        (run / "facts.json").write_text(json.dumps(facts))
        ended = run_here("sample", run)
        known = one_line(ended, "should hold wte.weight of", "has none of that name")
        assert known or one_line(ended, "is not a positive whole number up to"), ended
