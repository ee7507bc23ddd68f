"""What a start waits for: of torch what every rank needs, and not its compiler, which takes as long again."""

import ast
import importlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import onefold
from onefold.cli.main import COMMANDS, Command, main
from onefold.cost.states import STATE_COSTS
from onefold.optim.elementwise import OPTIMIZERS
from onefold.optim.named import choose
from onefold.settings.precision import Precision
from onefold.settings.widths import widths_of
from tests.harness.patience import PATIENCE_S

SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.pipelining", "sympy",
        "matplotlib", "transformers", "accelerate", "lightning", "ray")  # fmt: skip
LOADED = """
import importlib, json, sys, torch
before = set(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
WITHOUT_TORCH = """
import contextlib, io, json, sys
import onefold_command
said = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["onefold", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = onefold_command.main()
        except SystemExit as end:
            code = end.code
    assert not code, line
    assert "torch" not in sys.modules, line
    said[line] = out.getvalue()
print(json.dumps(said))
"""


def test_help_version_and_a_plan_by_formula_import_no_torch():
    lines = [
        "--version",
        "--help",
        "plan --help",
        "plan --model llama-3-8b --ranks 8",
        "plan --params 7.5e9 --ranks 64",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["--version"] == f"onefold {onefold.__version__}\n"
    assert "verify-checkpoint" in said["--help"] and "--hardware" in said["plan --help"]


def test_what_a_plan_knows_without_torch_is_what_torch_says():
    assert {name: choose(name).cost for name in [*OPTIMIZERS, "muon"]} == STATE_COSTS
    for compute, master in (("fp32", None), ("bf16", "fp32"), ("bf16", "split"), ("fp16", "fp32")):
        chosen = Precision(compute=compute, master=master).decided(own_sum=True, cuda=True)
        assert widths_of(compute, master) == chosen.dtypes(chosen.compute).widths


def test_type_checkers_and_the_running_package_find_the_same_names_in_the_same_modules():
    tree = ast.parse(Path(onefold.__file__).read_text())
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_checkers.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: importlib.import_module(str(node.module)) for node in imports for alias in node.names}
    assert {name: getattr(onefold, name) for name in seen} == {name: getattr(at, name) for name, at in seen.items()}
    assert set(dir(onefold)) >= set(onefold.__all__) >= set(seen)


def test_neither_the_package_nor_a_command_loads_the_compiler():
    modules = ["onefold", *sorted({command.module for command in COMMANDS.values()})]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(modules)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    loaded = json.loads(done.stdout)
    assert set(modules) <= set(loaded)
    assert [name for name in loaded if name in SLOW] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_command_that_needs_torch_says_so_at_once_and_only_to_people(monkeypatch):
    said = []
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["train", "--steps", "0"]) == 2
        said.append(stderr.getvalue().splitlines())
    assert said[0] == ["onefold: loading torch …", *said[1]] and len(said[1]) == 1


@dataclass(frozen=True)
class Greedy:
    """A command for which there is no memory."""

    def run(self) -> int:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1\nmore")


def test_no_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "greedy", Command(__name__, "Greedy", ""))
    assert main(["greedy"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onefold: out of memory: ") and said.count("\n") == 1 and "smaller" in said


def test_what_is_loaded_late_is_there_when_it_is_asked_for():
    assert all(hasattr(onefold, name) for name in onefold.__all__)
    assert onefold.PipelineStage.__module__ == "onefold.parallel.pipeline"
    assert not hasattr(onefold, "PipelineStages")


def test_without_lightning_its_door_says_what_to_install():
    code = "import sys; sys.modules['lightning'] = None; import onefold.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "pip install 'lightning>=2.6'" in done.stderr.splitlines()[-1]
