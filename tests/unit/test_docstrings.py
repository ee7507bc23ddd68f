"""Every example in the code's documentation runs, and every public name has one."""

import contextlib
import doctest
import importlib
import inspect
import io
from pathlib import Path
from typing import NamedTuple

import pytest

import onefold
from tests.harness import fresh_ranks
from tests.harness.patience import PATIENCE_S

SOURCE = Path(onefold.__file__).parent
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>>" in path.read_text()]
MODULES = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES]


class Examples(NamedTuple):
    """What came of running them."""

    ran: dict[str, int]  # by name, how many
    failed: int
    said: str


def run_examples(modules: list[str]) -> Examples:
    """In a process of their own, because they call onefold.init()."""
    ran = {}
    runner = doctest.DocTestRunner()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for module_name in modules:
            module = importlib.import_module(module_name)
            found = doctest.DocTestFinder(recurse=False).find(module, globs=vars(module))
            for name, value in vars(module).items():
                here = getattr(value, "__module__", None) == module_name
                if here and (inspect.isroutine(value) or inspect.isclass(value)):
                    # unwrapped: doctest takes what @contextmanager returns for contextlib's own and skips it
                    found += doctest.DocTestFinder().find(inspect.unwrap(value), name, module=False, globs=vars(module))
            for test in found:
                if test.examples:
                    runner.run(test)
                    ran[test.name] = len(test.examples)
        failed = runner.summarize().failed
    return Examples(ran, failed, said.getvalue())


@pytest.fixture(scope="module")
def examples() -> Examples:
    (outcome,) = fresh_ranks(1, run_examples, MODULES, init=False, timeout_s=PATIENCE_S)
    assert outcome.error is None, outcome.error
    found: Examples = outcome.value
    return found


def public_names() -> list[str]:
    """What users call: no exceptions, no reports."""
    things = {name: getattr(onefold, name) for name in onefold.__all__ if not name.endswith("Report")}
    return [name for name, thing in things.items() if not (inspect.isclass(thing) and issubclass(thing, Exception))]


def test_every_example_gives_what_it_says(examples):
    assert examples.failed == 0, examples.said


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example_that_runs(name, examples):
    assert examples.ran.get(name, 0) > 0


@pytest.mark.parametrize("name", onefold.__all__)
def test_every_public_name_is_explained(name):
    assert inspect.getdoc(getattr(onefold, name))
