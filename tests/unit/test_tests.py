"""The order of the tests: models live in tests/models, and no test reaches for a private field of another room."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from tests import models
from tests.conftest import FRAMEWORKS, PLACES, needs_a_framework

TESTS = Path(__file__).parents[1]
MODULES = {
    name
    for room in (nn, models)
    for name, value in vars(room).items()
    if inspect.isclass(value) and issubclass(value, nn.Module)
}

OF_PYTHON = {
    "_asdict", "_replace", "_fields", "_exit", "_getframe", "_run_exitfuncs", "_ncallbacks", "_register_atexit",
    "_registry",
}  # fmt: skip
OF_TORCH = {"_schema", 
    "_C", "_current_graph_task_id", "_dynamo", "_is_profiler_enabled", "_forward_hooks", "_world", "_allgather_base",
    "_reduce_scatter_base", "_foreach_norm", "_foreach_add_", "_parameters", "_post_accumulate_grad_hooks", "_apply",
}  # fmt: skip
OF_HUGGING_FACE = {"_reset_state", "_train_batch_size"}  # several Accelerators in one process; what a Trainer found
NO_FACE = {"_may_stay_unflattened"}  # the reference run of tests/parity/precision/test_loose.py


@cache
def trees() -> dict[str, ast.Module]:
    files = [path for path in sorted(TESTS.rglob("*.py")) if TESTS / "models" not in path.parents]
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in files}


def modules_of(tree: ast.Module) -> list[str]:
    """Subclasses of nn.Module that a file defines outside functions."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & (MODULES | set(found)):
                found.append(node.name)
    return found


def private_fields(tree: ast.Module) -> list[str]:
    """Private attributes a file uses, but for those of its own classes."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = [node for node in attributes if node.attr.startswith("_") and not node.attr.endswith("__")]
    own = {node.attr for node in private if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [ast.unparse(node) for node in private if node.attr not in own | OF_PYTHON | OF_TORCH | OF_HUGGING_FACE]


def test_toy_models_live_in_one_place():
    assert {name: found for name, tree in trees().items() if (found := modules_of(tree))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class A(nn.Module): pass", ["A"]),
        ("class A(torch.nn.Linear): pass", ["A"]),
        ("class A(Stack): pass", ["A"]),
        ("class A(nn.Module): pass\nclass B(A): pass", ["A", "B"]),
        ("class A(NamedTuple): pass", []),
        ("def test():\n    class A(nn.Module): pass", []),
    ],
)
def test_a_model_is_seen_whatever_it_inherits_from(text, found):
    assert modules_of(ast.parse(text)) == found


def test_tests_use_the_face_of_what_they_test():
    used = {name: found for name, tree in trees().items() if (found := private_fields(tree))}
    assert {at.rpartition(".")[2] for found in used.values() for at in found} <= NO_FACE, used


def test_the_files_that_are_to_begin_first_are_there():
    assert [path for path in PLACES if not path.is_file()] == []


def imported(tree: ast.Module) -> set[str]:
    """Packages that a file imports, at its top or inside functions."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_tests_that_import_a_framework_share_a_worker():
    """Each worker has ranks of its own, and in each rank the import takes seconds."""
    assert [name for name in FRAMEWORKS if not (TESTS.parent / name).exists()] == []
    slow = {"accelerate", "lightning", "peft", "transformers", "trl"}
    found = [
        f"tests/{name}"
        for name, tree in trees().items()
        if Path(name).name.startswith("test_") and imported(tree) & slow
    ]
    assert len(found) > 10 and [name for name in found if not needs_a_framework(name)] == []
