"""It learns: the loss falls below that of a table of pairs, and a larger model gets further in as many steps."""

from pathlib import Path

import pytest

from onefold.train.run.records import read_facts, read_metrics
from tests.train.launched import run
from tests.train.pooled import trained

WORDS = ["alpha", "alps", "album", "alarm", "also"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """A small model and a larger one, on text that pairs say little about: what comes next depends on more."""
    folder = tmp_path_factory.mktemp("learns")
    text = "".join(f"{WORDS[i % 5]} {WORDS[(3 * i + 1) % 5]}\n" for i in range(4000))
    (folder / "text.txt").write_text(text)
    found = []
    for layers, hidden in ((1, 8), (2, 64)):
        found.append(folder / f"{layers}x{hidden}")
        trained(
            2, found[-1], model={"layers": layers, "hidden": hidden, "heads": 2, "seq": 32},
            data={"data": str(folder / "text.txt")}, adam={"lr": 4e-3, "warmup": 10},
            steps={"micro_batch": 4, "log_every": 10, "eval_every": 0, "eval_windows": 32, "steps": 80},
        )  # fmt: skip
    return found


def test_a_larger_model_reaches_a_lower_perplexity_in_as_many_steps(runs):
    small, large = (read_metrics(out) for out in runs)
    assert small[-1]["loss"] < small[0]["loss"] - 0.5 and large[-1]["loss"] < large[0]["loss"] - 0.5
    assert large[-1]["val_ppl"] < 0.8 * small[-1]["val_ppl"]


def test_the_validation_loss_falls_below_that_of_a_table_of_pairs(runs):
    out = runs[1]
    assert read_metrics(out)[-1]["val_loss"] < 0.8 * read_facts(out)["baseline"]["bigram_val_loss"]


@pytest.mark.soak
def test_the_demo_beats_the_table_of_pairs_on_the_standard_library(tmp_path):
    code, out, err = run(tmp_path / "run", "--ranks", "2")
    assert code == 0, err
    assert "beaten" in out and "not beaten" not in out
    assert (tmp_path / "run" / "report.html").exists()
    baseline = read_facts(tmp_path / "run")["baseline"]["bigram_val_loss"]
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] < baseline - 0.15
