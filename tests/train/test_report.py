"""`onefold report` makes one page of a run, and of a comparison, that a real browser shows whole at any width."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.cli.main import main
from onefold.cli.report import compared
from onefold.errors import OnefoldError
from onefold.train.report import comparison, sections
from onefold.train.report.charts import Chart
from onefold.train.report.figures import STATES, Run, agreement, formula_memory, headline, read_run, smooth, thin
from onefold.train.report.report import write_comparison, write_report
from onefold.train.run.records import run_folders
from tests.train.browser import look, needs_browser
from tests.train.pooled import trained
from tests.train.written import PSI, RANKS, facts_of, write_profile, write_run

SECTIONS = [
    "Loss", "Speed and optimisation", "Memory", "Traffic", "Placement", "Warnings", "Environment", "Settings",
]  # fmt: skip
COMPARED = ["Loss", "Memory, traffic, time", "Measured and by formula", "Runs", "Environment", "Settings"]
PICTURES = {"loss.png", "memory.png", "traffic.png", "tokens-per-s.png", "lr.png", "grad-norm.png", "loss-clock.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    write_run(folder, placement=long_units())
    write_profile(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real ones: the same small training at each stage, on two ranks."""
    folder = tmp_path_factory.mktemp("compare")
    for stage in range(4):
        trained(
            2, folder / f"stage-{stage}", zero={"stage": stage}, data={"data": __file__}, model={"hidden": 64},
            steps={"steps": 4, "micro_batch": 1}, checkpoints={"save_every": 0},
            plan=True,
        )  # fmt: skip
    write_comparison(folder)
    return folder


def long_units(times: int = 2) -> list[dict[str, Any]]:
    """Names wider than a phone."""
    rows = times * facts_of(3)["placement"]
    each = rows[0]["parameter_bytes"] // times
    return [row | {"unit": 60 * "long." + str(n), "parameter_bytes": each} for n, row in enumerate(rows)]


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text()


def cells(page: str, row: str, place: int = 0) -> list[str]:
    """What a row of a table says, without its markup."""
    found = []
    for line in re.findall(r"<tr class=\"[^\"]*\">(.*?)</tr>", page, re.DOTALL):
        plain = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)]
        found += [plain[1:]] if plain[0] == row else []
    return found[place]


def sizes(row: list[str]) -> list[float]:
    found = [re.search(r"([\d.]+)\s(k|M)B", cell) for cell in row]
    return [float(size[1]) * {"k": 1e3, "M": 1e6}[size[2]] for size in found if size]


# -- in a browser ------------------------------------------------------------------------------------------------------


def spread(picture: Path, width: int) -> list[float]:
    """How much pixels differ in each screenful from top to bottom."""
    from PIL import Image, ImageStat

    image = Image.open(picture).convert("L")
    return [ImageStat.Stat(image.crop((0, top, width, top + 700))).stddev[0] for top in range(0, 2100, 700)]


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_shows_every_section_and_chart_and_nothing_is_too_wide(run, tmp_path, width, dark):
    seen = look(run / "report.html", width, dark=dark, picture=tmp_path / "page.png")
    titles = [*SECTIONS[:2], "Where a step goes", *SECTIONS[2:]]
    assert seen["titles"] == ["gpt-tiny, 841\u00a0k parameters", *titles]
    assert (seen["width"], seen["scroll"], seen["dark"]) == (width, width, dark)
    assert len(seen["charts"]) == len(PICTURES) and min(seen["charts"]) > 250
    assert seen["least"] >= 9, "text in charts is too small to read"
    assert seen["unnamed"] == 0
    assert min(spread(tmp_path / "page.png", width)) > 8


@needs_browser
def test_a_browser_shows_the_comparison_on_a_phone(stages, tmp_path):
    seen = look(stages / "report.html", 390, picture=tmp_path / "page.png")
    assert seen["titles"] == ["gpt-tiny at stages 0, 1, 2 and 3", *COMPARED]
    assert (seen["width"], seen["scroll"]) == (390, 390)
    assert len(seen["charts"]) == 4 and seen["least"] >= 9
    assert min(spread(tmp_path / "page.png", 390)) > 8


# -- what the page says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["run", "stages"])
def test_the_page_needs_nothing_but_itself(which, request):
    page = page_of(request.getfixturevalue(which))
    assert re.findall(r"https?:|<script|@import|<img|xmlns", page) == []
    links = re.findall(r'(?:href|src)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    links = [link for link in links if not re.fullmatch(r"stage-\d/report.html", link)]  # pages beside it
    names = set(re.findall(r'\bid="([^"]*)"', page))
    assert [link for link in links if not ((link.startswith("#") and link[1:] in names) or link == "data:,")] == []
    assert len(names) == len(re.findall(r'\bid="', page)), "two elements have one id"


def test_charts_are_png_files_beside_the_page(run):
    from PIL import Image

    assert {path.name for path in run.glob("*.png")} == PICTURES
    for name in PICTURES:
        low, high = Image.open(run / name).convert("L").getextrema()
        assert low < 130 and high == 255, f"{name} is blank"


def test_every_colour_has_a_second_one_for_the_dark(run):
    style = page_of(run).split("</style>")[0]
    day, night = (set(re.findall(r"(--\w+):", part)) for part in style.split("@media screen")[:2])
    used = set(re.findall(r"var\((--\w+)\)", page_of(run)))
    assert used <= day and day == night


def test_the_page_says_what_a_reader_asks_first(run):
    page, last = page_of(run), read_run(run).metrics[-1]
    for text in ("validation loss", f"{last['val_loss']:.3f}", "2.463", "stage 3", "long."):
        assert text in page
    assert '<strong class="good">better</strong>' in page
    assert "raise --bucket-mb" in page and "steps 40 to 41" in page and "ranks 0, 1" in page
    assert "model = &quot;gpt-tiny&quot;" in page and "aarch64" in page


def test_memory_and_traffic_stand_beside_their_plan(run):
    page = page_of(run)
    assert cells(page, "parameters") == ["1.69\u00a0MB", "1.68\u00a0MB", "+0.4%"]
    assert cells(page, "gather-forward") == ["1.68\u00a0MB", "1.68\u00a0MB", "exact"]
    assert cells(page, "in Ψ(N-1)/N")[:2] == ["2.98", "at most 3"]
    assert cells(page, "peak")[2] == "-0.9%"
    assert cells(page, "activations") == ["36.9\u00a0MB", "37.0\u00a0MB", "-0.3%"]


def test_a_model_worse_than_the_baseline_is_called_worse(run):
    found = read_run(run)
    found = found._replace(facts=found.facts | {"baseline": {"bigram_val_loss": 0.5}})
    assert '<strong class="bad">worse</strong>' in sections.lead(found)


def test_a_long_placement_table_is_folded(run):
    assert "<details open>" in page_of(run)
    long = read_facts_only(facts_of(3) | {"placement": long_units(3)})
    assert "<details><summary>18 units</summary>" in sections.placement(long).body


def test_names_from_a_run_never_become_markup(tmp_path):
    bad = "<script>alert(1)</script>&\"'"
    facts = facts_of(3)
    write_run(
        tmp_path / "run", model=facts["model"] | {"name": bad}, precision=bad, device=bad, stage_why=bad,
        placement=[{"unit": bad}], environment={bad: bad}, data={"source": bad},
        plan={"memory": {}, "traffic": {bad: 1}},
    )  # fmt: skip
    (tmp_path / "run/config.toml").write_text(bad)
    (tmp_path / "run/warnings.jsonl").write_text(json.dumps({"step": 1, "rank": 0, "kind": bad, "message": bad}) + "\n")
    page = write_report(tmp_path / "run").read_text()
    assert "<script" not in page and "alert(1)" in page


# -- stages side by side -----------------------------------------------------------------------------------------------


def test_equal_losses_are_said_to_be_the_same_bits(stages):
    page = page_of(stages)
    assert "The same bits" in page and "the largest difference is 0" in page
    assert "Stage 3 holds 50% less training state" in page


def test_a_difference_in_the_last_bit_is_found_and_said(stages):
    runs = [read_run(stages / f"stage-{n}") for n in range(4)]
    row = runs[2].metrics[2]
    row["loss"] = math.nextafter(row["loss"], 100)
    gap = agreement(runs)
    said = comparison.lead(runs, gap)
    assert "The losses differ" in said and "step 3" in said
    assert 0 < gap.largest < 1e-14 and gap.at == 3


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("parameters", (2, 2, 2, 1)),
        ("gradients", (2, 2, 1, 1)),
        ("optimizer", (2, 1, 1, 1)),
        ("states", (8, 6, 5, 4)),
    ],
)
def test_memory_stands_in_the_proportions_of_the_stages_with_the_formula_beside(stages, row, parts):
    page = page_of(stages)
    measured = sizes(cells(page, row))
    assert measured == pytest.approx([measured[0] * part / parts[0] for part in parts], rel=0.02)
    formula = sizes(cells(page, "by formula", STATES.index(row) if row in STATES else 3))
    assert formula == pytest.approx(measured, rel=0.02)


def test_the_formula_is_the_papers():
    """fp32 Adam, N = 2: 16, 12, 10 and 8 bytes per parameter; 16 bits with an fp32 master: 16, 10, 9 and 8."""
    for precision, wanted in (("fp32", (16, 12, 10, 8)), ("bf16", (16, 10, 9, 8))):
        for stage, per_parameter in enumerate(wanted):
            run = read_facts_only(facts_of(stage) | {"precision": precision})
            assert sum(formula_memory(run).values()) == per_parameter * PSI
    assert RANKS == 2


def read_facts_only(facts: dict[str, Any]) -> Run:
    return Run(Path("run"), facts, [], [], "")


def test_each_stage_has_a_page_of_its_own_that_the_comparison_leads_to(stages):
    for stage in range(4):
        assert f'href="stage-{stage}/report.html"' in page_of(stages)
        assert f"at stage {stage} in fp32" in page_of(stages / f"stage-{stage}")


def test_traffic_is_two_psi_and_at_most_three_at_stage_3(stages):
    *two, three = (float(cell) for cell in cells(page_of(stages), "in Ψ(N-1)/N"))
    assert two == pytest.approx([2, 2, 2], abs=0.02)
    assert 2 < three <= 3.02


# -- folders that are not as they should be ----------------------------------------------------------------------------


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["report", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_run_without_a_logged_step_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=0, warnings=0)
    page = write_report(tmp_path / "run").read_text()
    assert "No step has been logged yet" in page and "Placement" in page


def test_a_run_that_became_nan_and_tore_its_last_line_has_a_page_and_strict_json(tmp_path, capsys):
    write_run(tmp_path / "run", steps=120)
    with (tmp_path / "run/metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": 121, "loss": math.nan, "grad_norm": math.inf, "val_loss": math.nan}) + "\n")
        out.write('{"step": 122, "loss": 1.')
    code, out, _ = said([str(tmp_path / "run"), "--json"], capsys)
    figures = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (code, figures["steps"], figures["loss"]) == (0, 121, None)
    assert "NaN" in page_of(tmp_path / "run")


@given(st.lists(st.sampled_from(sorted(facts_of(3))), unique=True), st.sampled_from([{}, {"step": 1, "loss": 2.0}]))
def test_every_section_is_made_whatever_facts_are_missing(missing, row):
    run = read_facts_only({key: value for key, value in facts_of(3).items() if key not in missing})
    run, blank = run._replace(metrics=[row] if row else []), Chart("blank", "", "", b"")
    made = [
        sections.loss(run, blank, blank), sections.progress(run, {}), sections.memory(run, blank),
        sections.traffic(run, blank), sections.placement(run), sections.warnings(run), sections.environment(run),
        sections.settings(run),
    ]  # fmt: skip
    assert [section.title for section in made] == SECTIONS and all(section.body for section in made)
    assert sections.lead(run) and len(sections.cards(headline(run))) == 8


def test_a_run_that_knows_nothing_of_itself_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=0)
    (tmp_path / "run/facts.json").write_text("{}")
    assert "unnamed model" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "facts.json").unlink(), "is no run folder"),
        (lambda run: (run / "facts.json").write_text("{"), "facts.json is no JSON"),
        (lambda run: (run / "facts.json").write_text("[]"), "not the facts of a run"),
        (lambda run: (run / "metrics.jsonl").write_text("{}{\n{}\n"), "metrics.jsonl is no JSON"),
        (lambda run: (run / "report.html").mkdir(), "cannot be written"),
    ],
)
def test_a_damaged_folder_is_one_line_and_exit_code_2(tmp_path, capsys, damage, words):
    write_run(tmp_path / "run", steps=3)
    damage(tmp_path / "run")
    code, out, err = said([str(tmp_path / "run")], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    code, out, err = said([str(tmp_path / "nowhere")], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and "onefold train" in err
    with pytest.raises(OnefoldError, match="no runs to compare"):
        write_comparison(tmp_path)


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run", steps=3)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = said([str(tmp_path / "run")], capsys)
    assert code == 2 and "pip install 'onefold[report]'" in err


# -- figures -----------------------------------------------------------------------------------------------------------


def test_json_has_the_headline_figures_and_the_page_is_the_same_every_time(run, stages, capsys):
    before = page_of(run), (run / "loss.png").read_bytes()
    code, out, _ = said([str(run), "--json"], capsys)
    assert (page_of(run), (run / "loss.png").read_bytes()) == before
    figures, last = json.loads(out), read_run(run).metrics[-1]
    assert code == 0
    assert figures["loss"] == last["loss"] and figures["val_loss"] == last["val_loss"]
    assert figures["better_than_baseline"] == pytest.approx(2.4631 - last["val_loss"])
    assert figures["val_ppl"] == pytest.approx(math.exp(last["val_loss"]))
    assert (figures["ranks"], figures["stage"], figures["precision"], figures["warnings"]) == (2, 3, "fp32", 2)
    assert figures["tokens"] == 200 * 2048 and figures["states_bytes"] == pytest.approx(8 * PSI, rel=0.01)
    both = compared({path.name: path for path in run_folders(stages)})
    assert both["agreement"] == {"steps": 4, "largest": 0.0, "at": None, "bitwise": True}
    assert sorted(both["runs"]) == [f"stage-{n}" for n in range(4)]


def test_any_runs_are_compared_on_one_page_with_a_clock_and_links_to_their_own(tmp_path, capsys):
    folders = [tmp_path / where / "run" for where in ("first", "second")]
    for number, folder in enumerate(folders):
        write_run(folder, seed=number)
    out = tmp_path / "both"
    code, printed, _ = said([*map(str, folders), "--out", str(out), "--json"], capsys)
    figures = json.loads(printed)
    assert code == 0 and figures["page"] == str(out / "report.html")
    assert list(figures["runs"]) == [str(folder) for folder in folders] and not figures["agreement"]["bitwise"]
    page = page_of(out)
    lowest = min(figures["runs"].values(), key=lambda one: one["val_loss"])["val_loss"]
    assert f"The lowest validation loss is {lowest:.4f}"[:35] in page and "Loss against the clock" in page
    for name in ("first-run", "second-run"):
        assert f'href="{name}/report.html"' in page and (out / name / "report.html").is_file()
    assert said([str(folders[0]), str(folders[0])], capsys)[2].endswith("is given twice; give each run once\n")
    assert "which run?" in said([], capsys)[2]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 50))
def test_a_thinned_curve_keeps_its_ends_its_lowest_and_its_highest(values, most):
    steps = list(range(len(values)))
    kept, shown = thin(steps, values, most)
    assert len(kept) <= most + 4 or len(kept) == len(values)
    assert (kept[0], kept[-1]) == (0, len(values) - 1) and kept == sorted(set(kept))
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert all(values[step] == value for step, value in zip(kept, shown, strict=True))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_a_trend_stays_between_the_values_it_is_made_of(values):
    trend = smooth(values)
    assert len(trend) == len(values)
    assert min(trend) >= min(values) - 1e-6 and max(trend) <= max(values) + 1e-6


def test_agreement_is_not_fooled_by_nan_or_by_missing_steps():
    def run_of(*losses: float | None) -> Any:
        made = read_facts_only({})
        return made._replace(metrics=[{"step": n, "loss": loss} for n, loss in enumerate(losses)])

    nan = math.nan
    assert agreement([run_of(1.0, nan), run_of(1.0, nan)]).bitwise
    assert not agreement([run_of(1.0, nan), run_of(1.0, 2.0)]).bitwise
    assert agreement([run_of(1.0, 2.0), run_of(1.0)]) == (1, 0.0, None)
    assert not agreement([run_of(), run_of()]).bitwise
