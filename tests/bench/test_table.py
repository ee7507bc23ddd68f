"""Tables in the documentation are what the results say: written by a program, checked by this test."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.systems.table import SYSTEMS

PAGES = ("README.md", "docs/performance.md")


def result(work: str, kind: str, *, fsdp2_s: float = 0.4, **others_s: float) -> dict[str, Any]:
    """As a run writes it."""
    shown = table.KINDS[kind][work]
    systems = {}
    for name, seconds in {"fsdp2": fsdp2_s, **others_s}.items():
        systems[name] = {
            "error": None, "parameters": 1.64e9, "median_s": seconds, "quartiles_s": [seconds, seconds],
            "ratio": seconds / fsdp2_s, "paired_ratio": seconds / fsdp2_s, "steps_s": [seconds] * 5,
            "peak_rss_bytes": 3 << 30,
        }  # fmt: skip
    return {
        "work": dataclasses.asdict(shown),
        "machine": {"cpu": "A CPU", "cores": 4, "memory_gib": 8, "gpu": "A GPU" if kind == "gpu" else None},
        "versions": {"onefold": "0.1", "torch": "2.13", "python": "3.12", "deepspeed": None},
        "date": "2026-01-02 03:04 UTC", "command": f"python -m benchmarks.{kind}", "base": "fsdp2", "systems": systems,
    }  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the pages, with results of its own."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(table.ROOT / page, tmp_path / page)
    (tmp_path / "results").mkdir()
    return tmp_path


def run(site: Path, *words: str) -> int:
    return table.main([*words, "--root", str(site), "--results", str(site / "results")])


def put(site: Path, name: str, found: dict[str, Any]) -> None:
    (site / "results" / name).write_text(json.dumps(found))


def test_the_tables_of_this_repository_are_what_its_results_say() -> None:
    assert table.main(["--check"]) == 0


def test_without_results_what_stands_there_stays(site: Path) -> None:
    before = [(site / page).read_text() for page in PAGES]
    put(site, "quick-1x32-a-cpu-4-cores.json", result("1x32", "cpu"))
    assert run(site, "--check") == 0 and run(site) == 0
    assert [(site / page).read_text() for page in PAGES] == before


def test_tables_hold_what_was_measured_and_an_edited_one_is_found_out(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(site, "cpu-2x128-a-cpu-4-cores.json", result("2x128", "cpu", fsdp2_s=2.0, stage3=1.0))
    put(site, "gpu-1.64b-a-gpu.json", result("1.64b", "gpu", fsdp2_s=0.4, onefold=0.3))
    put(site, "gpu-offload-2.78b-a-gpu.json", result("offload-2.78b", "gpu", fsdp2_s=2.0, **{"onefold+inside": 0.5}))
    put(site, "gpu-5.25b-a-gpu.json", result("5.25b", "gpu", fsdp2_s=2.0, **{"onefold+inside": 0.5}))
    assert run(site, "--check") == 1, "new results, old tables"
    assert run(site) == 0 and run(site, "--check") == 0
    text = (site / "README.md").read_text()
    assert "A CPU, 4 cores, torch 2.13, Onefold 0.1, 2026-01-02; fp32" in text
    assert "| Onefold, stage 3 | 0.500×, 3.00 GiB |" in text
    assert "|  | 1.64B (48×1600), batch 8 | 1.64B (24×4096), batch 8 |" in text
    assert "| FSDP2 | 400 ms | 2000 ms |" in text and "| Onefold | 0.750× |  |" in text
    whole = (site / "docs/performance.md").read_text()
    assert "| Onefold, stage 3 | 1000.0 ms |" in whole
    assert "| offload, 1.64B (32×2560), batch 16 |" in whole and "| Onefold, updated in backward | 500.0 ms |" in whole
    (site / "README.md").write_text(text.replace("0.500×", "0.400×"))
    capsys.readouterr()
    assert run(site, "--check") == 1
    assert capsys.readouterr().err.startswith("README.md: a table is not what the results say")


def test_the_readme_shows_a_few_systems_of_the_machine_measured_last_and_the_other_page_shows_all(site: Path) -> None:
    newer = result("2x128", "cpu", stage0=0.2, stage3=0.3) | {"date": "2026-01-03 00:00 UTC"}
    newer["machine"] = newer["machine"] | {"cpu": "A newer CPU"}
    put(site, "cpu-2x128-a-newer-cpu-4-cores.json", newer)
    put(site, "cpu-2x128-an-older-cpu-4-cores.json", result("2x128", "cpu", stage3=0.3))
    assert run(site) == 0
    text, whole = (site / "README.md").read_text(), (site / "docs/performance.md").read_text()
    assert "A newer CPU" in text and "A CPU" not in text
    assert "| Onefold, stage 3 |" in text and "| Onefold, stage 0 |" not in text
    assert "A newer CPU" in whole and "A CPU" in whole and "| Onefold, stage 0 |" in whole


def test_what_the_readme_is_to_show_are_works_and_systems_that_there_are() -> None:
    for kind, chosen in table.IN_README.items():
        assert set(chosen.works) <= set(table.KINDS[kind]) and set(chosen.systems) <= set(SYSTEMS)


def test_ranks_that_share_a_gpu_get_a_column_and_say_how_they_shared_it(site: Path) -> None:
    put(site, "gpu-1.64b-a-gpu.json", result("1.64b", "gpu", fsdp2_s=0.4, onefold=0.3))
    shared = result("nccl-0.37b", "gpu", fsdp2_s=0.5, ddp=0.6, stage2=0.4)
    put(site, "gpu-nccl-0.37b-a-gpu.json", shared | {"mps": True})
    assert run(site) == 0
    text, whole = (site / "README.md").read_text(), (site / "docs/performance.md").read_text()
    assert "1.64B (48×1600), batch 8 | 2 ranks on one GPU, GPT 24×1024, 8×1024 tokens each |" in text
    assert "| Onefold, stage 2 |  | 0.800× |" in text and "| DDP |  | 1.200× |" in text
    assert "NCCL over loopback sockets, ranks side by side (CUDA MPS)" in whole and "| DDP | 600.0 ms |" in whole


def test_a_failed_system_is_said_to_have_failed(site: Path) -> None:
    found = result("1.64b", "gpu")
    found["systems"]["onefold"] = {"error": "rank 0: out of memory", "warm_up_s": []}
    put(site, "gpu-1.64b-a-gpu.json", found)
    assert run(site) == 0
    assert "| Onefold | failed |" in (site / "README.md").read_text()
    assert "| Onefold | failed |" in (site / "docs/performance.md").read_text()


def test_a_page_without_a_place_for_its_table_is_an_error(site: Path) -> None:
    text = (site / "README.md").read_text()
    (site / "README.md").write_text(text.replace("<!-- measured: gpu -->", ""))
    with pytest.raises(SystemExit, match=r"README.md has places for \['cpu'\], wanted \['cpu', 'gpu'\]"):
        run(site, "--check")
