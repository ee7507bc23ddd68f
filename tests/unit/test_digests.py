"""The tool that guards refactors: its table covers every pair, and a changed digest does not pass."""

import json

import pytest

from tools.digests.__main__ import main
from tools.digests.refusals import MISTAKES
from tools.digests.table import AXES, CASES, Case, Refusal, legal, legal_pairs, subsets, table

RUNS = [case for case in table() if isinstance(case, Case)]
TWO = next(case for case in RUNS if case.ranks == 1 and case.tier == "offload-host" and case.between == "resume")


def test_the_table_has_200_cases_of_different_names():
    assert len(table()) == CASES == 200 and len({case.name for case in table()}) == CASES
    assert {case.mistake for case in table() if isinstance(case, Refusal)} == set(MISTAKES)


def test_every_pair_of_values_that_may_meet_meets_in_some_case():
    met = {pair for case in RUNS for pair in subsets(case._asdict(), 2)}
    assert met == set(legal_pairs())
    assert all(legal(case._asdict()) for case in RUNS) and Case._fields == tuple(AXES)


def test_a_digest_is_the_same_again_and_a_changed_one_is_told(tmp_path, capsys):
    before, only = tmp_path / "before.json", ["--only", "/n1"]
    chosen = [TWO.name, "refused/disk-without-path/n1"]
    for name in chosen:
        assert main(["record", str(tmp_path / "one.json"), "--only", name]) == 0
        assert main(["compare", str(tmp_path / "one.json"), "--only", name]) == 0
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["cases"] == {chosen[1]: "refused ConfigError"} and {"torch", "machine", "onefold"} <= set(found)
    before.write_text(json.dumps({**found, "cases": {chosen[1]: "refused ModelError", "gone/n1": "0" * 64}}))
    capsys.readouterr()
    assert main(["compare", str(before), str(tmp_path / "one.json"), *only]) == 1
    told = capsys.readouterr().out.splitlines()
    assert f"different: {chosen[1]}" in told and "only before: gone/n1" in told
    assert max(map(len, told)) <= 80


def test_a_name_that_no_case_has_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no case has 'stage9' in its name"):
        main(["record", str(tmp_path / "none.json"), "--only", "stage9"])
