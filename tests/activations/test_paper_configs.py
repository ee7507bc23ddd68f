"""The paper's five configurations: presets by name, and an order that the planner reproduces."""

from pathlib import Path

import pytest

import onefold
from benchmarks.paper_configs import PAPER_BATCHES, PAPER_SIZES, of
from onefold.settings.zero import PRESETS


@pytest.fixture(scope="module")
def found():
    return {name: of(name) for name in PRESETS}


def test_presets_are_settings_by_name():
    assert [onefold.preset(name).stage for name in PRESETS] == [1, 1, 2, 2, 2]
    assert onefold.preset("C5", precision="bf16", checkpoint_every=2).activations == "partition+host"
    with pytest.raises(onefold.ConfigError, match=r"preset 'C6' is unknown; use one of C1, C2, C3, C4, C5"):
        onefold.preset("C6")


def test_the_largest_models_come_in_the_papers_order(found):
    ours, papers = ({name: size(name) for name in PRESETS} for size in (lambda n: found[n][1], PAPER_SIZES.get))
    assert sorted(ours, key=ours.get) == sorted(papers, key=papers.get) == ["C1", "C3", "C2", "C4", "C5"]
    assert all(ours[name] >= papers[name] for name in PRESETS), "what the paper ran must fit"


def test_the_largest_batches_come_in_the_papers_order(found):
    ours = [found[name].largest_batch for name in PRESETS]
    assert all(ours[i] >= PAPER_BATCHES[name] for i, name in enumerate(PRESETS))
    assert ours[0] < ours[2] < ours[3] <= ours[4], "C1 < C3 < C4 <= C5"
    assert ours[0] < ours[1] < ours[3], "sharing inputs allows more at either stage"


def test_cached_memory_falls_from_each_configuration_to_the_next_of_its_stage(found):
    at_40b = {name: found[name].cached_40b for name in PRESETS}
    assert at_40b["C1"] > at_40b["C2"] and at_40b["C3"] > at_40b["C4"] > at_40b["C5"] and at_40b["C1"] > at_40b["C3"]
    assert [name for name in PRESETS if found[name].cached_100b is None] == ["C1", "C2", "C3"]


def test_the_page_says_what_the_planner_says(found):
    page = (Path(__file__).parents[2] / "docs" / "activations.md").read_text()
    rows = {
        "largest model": [f"{one.largest_billions:.0f}B ({PAPER_SIZES[name]}B)" for name, one in found.items()],
        "largest batch": [f"{one.largest_batch} ({PAPER_BATCHES[name]})" for name, one in found.items()],
        "peak at 40B": [f"{one.cached_40b / 1e9:.1f} GB" for one in found.values()],
    }
    for head, cells in rows.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {head}")]
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == cells
