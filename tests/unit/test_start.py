"""What a start waits for: of torch what every rank needs, and not its compiler, which takes as long again."""

import json
import subprocess
import sys

import onefold
from onefold.cli.main import COMMANDS
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


def test_what_is_loaded_late_is_there_when_it_is_asked_for():
    assert all(hasattr(onefold, name) for name in onefold.__all__)
    assert onefold.PipelineStage.__module__ == "onefold.parallel.pipeline"
    assert not hasattr(onefold, "PipelineStages")


def test_without_lightning_its_door_says_what_to_install():
    code = "import sys; sys.modules['lightning'] = None; import onefold.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "pip install 'lightning>=2.6'" in done.stderr.splitlines()[-1]
