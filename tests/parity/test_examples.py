"""The demo ends well and shows what it should, and every piece of Python in the documentation runs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
DOCS = [path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md")]
DEMO = "examples/compare_stages.py"
SMALL = ("--steps", "2", "--layers", "2", "--dim", "32")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def small() -> subprocess.CompletedProcess[str]:
    """As `make demo`: two ranks."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", DEMO, *SMALL)


def cells(ran: subprocess.CompletedProcess[str], row: str) -> list[str]:
    """What a row of the table says of stages 0 to 3."""
    lines = [line.split(row, 1)[1] for line in ran.stdout.splitlines() if line.strip().startswith(row)]
    return re.split(r"\s{2,}", lines[0].strip())


def test_the_demo_ends_well_and_says_nothing_on_stderr(small):
    assert (small.returncode, small.stderr) == (0, "")
    assert "All four stages agree to the last bit" in small.stdout


def test_the_demo_shows_one_loss_for_all_stages(small):
    for step in ("step 1", "step 2"):
        assert len(set(cells(small, step))) == 1 and len(cells(small, step)) == 4


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("parameters", (2, 2, 2, 1)),
        ("gradients", (2, 2, 1, 1)),
        ("optimizer", (2, 1, 1, 1)),
        ("all three", (8, 6, 5, 4)),
    ],
)
def test_the_demo_shows_memory_in_the_proportions_of_the_stages(small, row, parts):
    measured = [float(cell) for cell in cells(small, row)]
    assert measured == pytest.approx([measured[0] * part / parts[0] for part in parts], abs=0.01)


def test_the_demo_shows_two_psi_of_traffic_and_at_most_three_at_stage_3(small):
    *two, three = (float(cell) for cell in cells(small, "in Ψ(N-1)/N"))
    assert two == pytest.approx([2, 2, 2], abs=0.05)
    assert 2 < three <= 3.05


def test_the_demo_refuses_a_width_that_heads_cannot_share():
    ran = python(DEMO, "--dim", "33")
    assert ran.returncode != 0
    assert "--dim a multiple of 32" in ran.stderr


class MyModel(nn.Module):
    """What the README leaves to its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch).square().mean()


def run_page(page: str, folder: str) -> int:
    """On a rank: all Python blocks of a page, one after the other, in one namespace and an empty folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_blocks(page)
    finally:
        os.chdir(before)


def run_blocks(page: str) -> int:
    text = (ROOT / page).read_text()
    names = {"MyModel": MyModel, "loader": [torch.ones(2, 8)] * 2}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # so that a traceback names the line of the page
        exec(compile(above + block[1], page, "exec"), names)
    return len(blocks)


PAGES = ["README.md", *(f"docs/{name}.md" for name in ("usage", "checkpoints", "planning", "parallelism"))]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_on_the_page_runs_on_two_ranks(page, tmp_path):
    assert min(run_ranks(2, run_page, page, str(tmp_path))) > 0


def test_every_setting_and_every_public_name_is_in_the_documentation():
    page = (ROOT / "docs/usage.md").read_text()
    wanted = [f"`{field.name}`" for field in dataclasses.fields(onefold.Zero)]
    assert [name for name in wanted if name not in page] == []
    wanted = [name for name in onefold.__all__ if not name.endswith("Report")]
    assert [name for name in wanted if name not in page] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *sorted(p.as_posix() for p in DOCS)])
def test_links_in_the_documentation_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()] == []
