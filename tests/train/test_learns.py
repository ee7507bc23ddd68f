"""It learns: the loss falls below that of a table of pairs, and a larger model gets further in as many steps."""

import pytest

from onefold.train.run import read_facts, read_metrics
from tests.train.launched import run
from tests.train.pooled import trained

STEPS = {"micro_batch": 4, "log_every": 10, "eval_every": 0, "eval_windows": 32}


def test_a_larger_model_reaches_a_lower_perplexity_in_as_many_steps(tmp_path):
    found = []
    for layers, hidden in ((1, 8), (2, 64)):
        out = tmp_path / f"{layers}x{hidden}"
        shape = {"layers": layers, "hidden": hidden, "heads": 2, "seq": 64}
        trained(2, out, model=shape, steps={**STEPS, "steps": 60}, adam={"lr": 4e-3, "warmup": 10})
        rows = read_metrics(out)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
        found.append(rows[-1]["val_ppl"])
    assert found[1] < 0.8 * found[0]


def test_the_validation_loss_falls_below_that_of_a_table_of_pairs(tmp_path):
    """On text that pairs say little about: which word comes next depends on more than its first letter."""
    words = ["alpha", "alps", "album", "alarm", "also"]
    (tmp_path / "text.txt").write_text("".join(f"{words[i % 5]} {words[(3 * i + 1) % 5]}\n" for i in range(4000)))
    shape = {"layers": 2, "hidden": 64, "heads": 2, "seq": 32}
    data = {"data": str(tmp_path / "text.txt")}
    trained(2, tmp_path / "run", model=shape, data=data, steps={**STEPS, "steps": 80}, adam={"lr": 4e-3, "warmup": 10})
    assert (
        read_metrics(tmp_path / "run")[-1]["val_loss"]
        < 0.8 * read_facts(tmp_path / "run")["baseline"]["bigram_val_loss"]
    )


@pytest.mark.soak
def test_the_demo_beats_the_table_of_pairs_on_the_standard_library(tmp_path):
    code, out, err = run(tmp_path / "run", "--ranks", "2")
    assert code == 0, err
    assert "beaten" in out and "not beaten" not in out
    assert (tmp_path / "run" / "report.html").exists()
    baseline = read_facts(tmp_path / "run")["baseline"]["bigram_val_loss"]
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] < baseline - 0.15
