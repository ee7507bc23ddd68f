"""Every example in the code's documentation runs, and every public name has one."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
from tests.harness.patience import PATIENCE_S

SOURCE = Path(onefold.__file__).parent
FILES = [path.relative_to(SOURCE.parent).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))]  # imports nothing
MODULES = [".".join(path.parts).removesuffix(".__init__") for path in FILES]

# In a process of their own, because they call onefold.init(). Prints name -> number of examples as its last line.
RUNNER = """
import doctest, importlib, inspect, json, sys

ran = {}
runner = doctest.DocTestRunner()
for module_name in sys.argv[1:]:
    module = importlib.import_module(module_name)
    found = doctest.DocTestFinder(recurse=False).find(module, globs=vars(module))
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module_name and (inspect.isroutine(value) or inspect.isclass(value)):
            # unwrapped: doctest takes what @contextmanager returns for contextlib's own and skips it
            found += doctest.DocTestFinder().find(inspect.unwrap(value), name, module=False, globs=vars(module))
    for test in found:
        if test.examples:
            runner.run(test)
            ran[test.name] = len(test.examples)
print(json.dumps(ran))
sys.exit(runner.summarize().failed)
"""


@pytest.fixture(scope="module")
def examples() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUNNER, *MODULES], capture_output=True, text=True, timeout=PATIENCE_S)


def public_names() -> list[str]:
    """What users call: no exceptions, no reports."""
    things = {name: getattr(onefold, name) for name in onefold.__all__ if not name.endswith("Report")}
    return [name for name, thing in things.items() if not (inspect.isclass(thing) and issubclass(thing, Exception))]


def test_every_example_gives_what_it_says(examples):
    assert examples.returncode == 0, examples.stdout + examples.stderr


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example_that_runs(name, examples):
    ran = next(json.loads(line) for line in examples.stdout.splitlines() if line.startswith("{"))
    assert ran.get(name, 0) > 0


@pytest.mark.parametrize("name", onefold.__all__)
def test_every_public_name_is_explained(name):
    assert inspect.getdoc(getattr(onefold, name))
