"""Each example runs, in small, and every piece of Python in the documentation runs.

The loops run on real ranks, the scripts with a real torchrun and a real training.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.train.run.records import read_facts, read_metrics
from tests.harness import run_ranks
from tests.harness.patience import PATIENCE_S
from tests.models import MeanSquare
from tests.train.launched import children

ROOT = Path(__file__).parents[2]
DOCS = [path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md")]
SMALL = ("--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--eval-windows", "4", "--log-every", "1",
         "--micro-batch", "1", "--global-batch", "2", "--data", __file__)  # fmt: skip


def example(name: str, *arguments: str) -> Any:
    """On a rank: what an example's main returns."""
    return importlib.import_module(f"examples.{name}").main(list(arguments))


def test_the_plain_loop_goes_on_where_it_stopped_bit_for_bit(tmp_path):
    whole = run_ranks(2, example, "plain_loop", "--steps", "12", "--out", str(tmp_path / "whole"))
    first = run_ranks(2, example, "plain_loop", "--steps", "5", "--out", str(tmp_path / "cut"))
    rest = run_ranks(2, example, "plain_loop", "--steps", "12", "--out", str(tmp_path / "cut"))
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    assert all(losses[-1] < losses[0] - 0.5 for losses in whole)


def test_a_hugging_face_model_is_tuned_exported_read_by_transformers_and_tuned_further(tmp_path):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "tuned"
    losses = run_ranks(2, example, "huggingface", "--steps", "12", "--lr", "1e-2", "--out", str(out))
    assert all(row[-1] < row[0] - 0.5 for row in losses)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor(list(Path(os.__file__).read_bytes()))
    again = run_ranks(2, example, "huggingface", "--weights", str(out), "--steps", "1", "--out", str(tmp_path / "more"))
    for rank, (loss,) in enumerate(again):  # the first batch of each rank, before anything was updated
        starts = torch.randint(len(tokens) - 64, (4,), generator=torch.Generator().manual_seed(rank)).tolist()
        batch = torch.stack([tokens[start : start + 64] for start in starts])
        assert model(input_ids=batch, labels=batch).loss.item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("four_bit", [[], ["--four-bit"]])
def test_adapters_are_trained_over_a_sharded_base_and_read_by_peft(four_bit, tmp_path):
    peft = pytest.importorskip("peft")
    if four_bit:
        pytest.importorskip("bitsandbytes")
    out = tmp_path / "adapters"
    losses = run_ranks(2, example, "lora", "--steps", "12", "--out", str(out), *four_bit)
    assert all(row[-1] < row[0] - 0.2 for row in losses)
    assert peft.PeftConfig.from_pretrained(out).r == 8
    held = sum(tensor.numel() for tensor in peft.load_peft_weights(str(out), device="cpu").values())
    assert held == 17_408  # of all linear layers of two blocks


# -- scripts -----------------------------------------------------------------------------------------------------------


def wait_for(what: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script in an environment, each in a session of its own; nothing of it outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def one(script: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
        here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [str(ROOT / "examples" / script), *arguments], env={**os.environ, **here, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield one
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session of this script, and nothing else
        process.wait()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=PATIENCE_S)[0]
    return process.returncode, said


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


# Slurm's commands as far as the script needs them, for the node that the script is on. What they start and signal is
# real.
SLURM = {
    "srun": '[ -z "$FAILS" ] || exit 3; shift; echo $$ >> "$CLUSTER/step"; exec "$@"',
    "scancel": '[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat "$CLUSTER/step")',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$*" > "$CLUSTER/requeued"; fi',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment as in a job on one node."""
    for name, body in SLURM.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    here = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        "PATH": here, "CLUSTER": str(tmp_path), "PORT": free_port(), "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip


@pytest.mark.soak  # of what it starts, the suite asks elsewhere that runs go on after kills and signals
def test_two_nodes_lose_a_rank_and_go_on_and_a_slurm_job_saves_before_its_time_is_up_and_goes_on(
    cluster: dict[str, str], start: Start, tmp_path: Path
) -> None:
    """One node is started by each script: they meet only if both say the same of nodes, place and name of the run."""
    out = tmp_path / "run"
    flags = ("--steps", "1000000", "--save-every", "5", "--out", str(out), *SMALL)
    job = start("slurm.sh", cluster | {"SLURM_NNODES": "2", "RESTARTS": "1"}, *flags)
    other = {"HEAD": "localhost", "PER_NODE": "1", "RESTARTS": "1", "ID": "7-0"}
    other |= {key: cluster[key] for key in ("PORT", "XDG_CACHE_HOME")}
    node = start("torchrun_two_nodes.sh", other, "--resume-or-start", *flags)
    lose_a_rank(out, lambda: int((tmp_path / "step").read_text().split()[0]), job, node)
    with (tmp_path / "step").open("a") as step:
        step.write(f"{node.pid}\n")  # scancel reaches every node
    os.kill(job.pid, signal.SIGUSR1)  # what Slurm sends, and only to the script
    code, said = end(job)
    assert code == 0, said
    end(node)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert read_facts(out)["ranks"] == 2
    before = read_metrics(out)
    cut = before[-1]["step"]
    assert (out / "checkpoints" / f"step-{cut:08}").exists(), "the step in hand was not saved"

    (tmp_path / "requeued").unlink()
    code, said = end(start("slurm.sh", cluster | {"SLURM_RESTART_COUNT": "1"}, "--steps", str(cut + 5), *flags[2:]))
    assert code == 0, said
    assert not (tmp_path / "requeued").exists()
    rows = read_metrics(out)
    assert rows[:cut] == before and [row["step"] for row in rows] == list(range(1, cut + 6))
    assert read_facts(out)["ranks"] == 1, "the next slot has one node"
    assert (out / "report.html").exists()


def lose_a_rank(out: Path, torchrun: Callable[[], int], *processes: subprocess.Popen[str]) -> None:
    """Kill a rank after a checkpoint of this start, and wait until the next start has saved one."""
    before = newest(out)
    wait_for(lambda: newest(out) > before, *processes)
    ranks = rank_pids(torchrun())
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(lambda: (now := rank_pids(torchrun())) and not set(now) & set(ranks), *processes)
    before = newest(out)
    wait_for(lambda: newest(out) > before, *processes)


def newest(out: Path) -> int:
    """The last checkpoint's step."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*")), default=0)


def rank_pids(torchrun: int) -> list[int]:
    found = []
    for pid in children(torchrun):
        with suppress(OSError):  # it ended just now
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def test_a_slurm_job_that_fails_ends_as_it_did_and_is_not_put_back(cluster, start, tmp_path):
    assert end(start("slurm.sh", cluster | {"FAILS": "yes"}))[0] == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("script", ["slurm.sh", "torchrun_two_nodes.sh"])
def test_a_script_is_good_bash_and_may_be_run(script):
    path = ROOT / "examples" / script
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""
    assert os.access(path, os.X_OK)


def test_two_nodes_ask_for_the_name_of_one(start):
    code, said = end(start("torchrun_two_nodes.sh", {"HEAD": ""}))
    assert code != 0 and "the name of one of the nodes" in said


# -- documentation -----------------------------------------------------------------------------------------------------


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
    names = {"MyModel": MeanSquare, "loader": [torch.ones(2, 8)] * 2}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # so that a traceback names the line of the page
        exec(compile(above + block[1], page, "exec"), names)
    return len(blocks)


PAGES = ["README.md", *sorted(page.as_posix() for page in DOCS if "\n```python" in (ROOT / page).read_text())]


NEEDED = {  # what a page imports, where it is no dependency
    "docs/huggingface.md": ("accelerate", "transformers"),
    "docs/peft.md": ("peft", "transformers", "bitsandbytes", "accelerate"),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_on_the_page_runs_on_two_ranks(page, tmp_path):
    for name in NEEDED.get(page, ()):
        pytest.importorskip(name)
    assert min(run_ranks(2, run_page, page, str(tmp_path))) > 0


GUIDES = [page for page in DOCS if page.name not in ("api.md", "api-frameworks.md", "architecture.md", "index.md")]


def test_every_setting_and_every_public_name_is_in_a_guide():
    guides = "\n".join((ROOT / page).read_text() for page in GUIDES)
    wanted = [field.name for field in dataclasses.fields(onefold.Zero)]
    assert [name for name in wanted if not re.search(rf"`{name}[`=]", guides)] == []
    wanted = [name for name in onefold.__all__ if not name.endswith("Report")]
    assert [name for name in wanted if not re.search(rf"onefold\.{name}\b|`{name}[`(]", guides)] == []


def sections(page: Path) -> list[str]:
    """Where links to the headings of a page lead, as GitHub makes it."""
    headings = re.findall(r"^##+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(page: Path) -> list[tuple[Path, str]]:
    """The page or file, and the section of it."""
    found = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in target]
    return [(page.parent / path if path else page, section) for path, _, section in found]


ALL_PAGES = ["README.md", "CONTRIBUTING.md", *sorted(page.as_posix() for page in DOCS)]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_in_the_documentation_lead_somewhere(page):
    targets = links(ROOT / page)
    assert [path for path, _ in targets if not path.exists()] == []
    assert [(path, section) for path, section in targets if section and section not in sections(path)] == []


WITH_CONTENTS = ["checkpoints", "gradients", "huggingface", "migration", "optimizers", "precision", "promises",
                 "reports", "shard", "stage3", "troubleshooting"]  # fmt: skip


@pytest.mark.parametrize("page", WITH_CONTENTS)
def test_the_list_of_contents_names_every_section(page):
    path = ROOT / "docs" / f"{page}.md"
    assert set(sections(path)) <= {section for target, section in links(path) if target == path}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_tests_that_the_documentation_names_are_there(page):
    """Files, and with -k parts of the names of tests in them."""
    text = (ROOT / page).read_text()
    assert [path for path in re.findall(r"\btests/[\w/]*\w(?:\.py)?", text) if not (ROOT / path).exists()] == []
    for paths, words in re.findall(r"`(?:pytest )?((?:tests/\S+ ?)+) -k (\"[^\"]+\"|\w+)`", text):
        found = [test for path in paths.split() for test in names_of_tests(ROOT / path)]
        wanted = set(re.findall(r"\w+", words)) - {"and", "or", "not"}
        assert found and [word for word in wanted if not any(word in test for test in found)] == []


def names_of_tests(path: Path) -> list[str]:
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [f"{file.name}::{name}" for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)]


def test_the_readme_takes_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_index_names_every_page():
    assert {path.name for path in DOCS} <= {target.name for target, _ in links(ROOT / "docs/index.md")} | {"index.md"}
